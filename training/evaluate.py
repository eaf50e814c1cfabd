"""Accuracy of a checkpoint through the reference implementation's own generate(), on held-out questions.

    python -m training.evaluate CHECKPOINT --count 500
    python -m training.evaluate CHECKPOINT --count 500 --q40

Prints a table and, with --json, writes the figures to a file.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import DiffusionGemmaForBlockDiffusion

from ddllm_vk.tasks import TASKS, Example, check, held_out
from training.model import load
from training.tokenizer import EOS, PAD, TURN_END, chat_prompt


def answers(
    model: DiffusionGemmaForBlockDiffusion, tokenizer: Tokenizer, examples: list[Example], steps: int
) -> list[tuple[str, int]]:
    """The model's answer to each question and the denoising steps it took, all in one batch.

    Prompts are left padded, which shifts the positions of a whole row alike and so changes nothing.
    """
    prompts = [tokenizer.encode(chat_prompt(example.prompt), add_special_tokens=False).ids for example in examples]
    length = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (length - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(ids, attention_mask=real, max_denoising_steps=steps)
    found = []
    for row, rate in zip(output.sequences[:, length:].tolist(), output.tokens_per_forward.tolist(), strict=True):
        tokens = sum(token != PAD for token in row)  # the reference reports tokens a step, padding left out
        end = next((index for index, token in enumerate(row) if token in (EOS, TURN_END, PAD)), len(row))
        found.append((tokenizer.decode(row[:end]), round(tokens / rate) if rate else 0))
    return found


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share, from 0 to 1."""
    z = 1.96
    centre = (right + z * z / 2) / (count + z * z)
    spread = z / (count + z * z) * math.sqrt(right * (count - right) / count + z * z / 4)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=500, help="questions a task")
    parser.add_argument("--task", action="append", choices=list(TASKS), help="only this one; may be repeated")
    parser.add_argument("--q40", action="store_true", help="round the weights as the shipped Q40 file does")
    parser.add_argument("--steps", type=int, default=48, help="denoising steps at most")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wrong", type=int, default=0, help="show this many wrong answers a task")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = load(args.checkpoint, args.q40)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    print(f"{'task':12}{'right':>11}{'accuracy':>10}{'95 % interval':>18}{'steps':>8}")
    figures = {}
    for task in args.task or TASKS:
        examples = held_out(task, args.count, args.seed)
        started = time.monotonic()
        right, used, wrong = 0, 0, []
        for start in range(0, args.count, args.batch):
            part = examples[start : start + args.batch]
            for example, (text, steps) in zip(part, answers(model, tokenizer, part, args.steps), strict=True):
                used += steps
                if check(example, text):
                    right += 1
                else:
                    wrong.append((example.prompt, text))
        low, high = interval(right, args.count)
        figures[task] = {
            "count": args.count,
            "right": right,
            "accuracy": right / args.count,
            "interval": [low, high],
            "steps": used / args.count,
            "seconds": time.monotonic() - started,
        }
        shown = f"{100 * low:.1f} to {100 * high:.1f} %"
        accuracy = f"{100 * right / args.count:.1f} %"
        print(f"{task:12}{f'{right}/{args.count}':>11}{accuracy:>10}{shown:>18}{used / args.count:8.1f}", flush=True)
        for prompt, text in wrong[: args.wrong]:
            print(f"    {prompt!r} -> {text!r}")
    if args.json:
        args.json.write_text(json.dumps({"q40": args.q40, "steps": args.steps, "tasks": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
