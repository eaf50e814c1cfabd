"""The quality of a model through this project's own engine: accuracy of every task, and accuracy against steps allowed.

    python -m training.quality MODEL [--weights f32] [--count 500] [--steps 2,4,8,16,48] [--plot FILE.png] [--json FILE]

MODEL is a folder in Hub format or a converted one. Prints one table of accuracies (per cent, with the 95% interval at
the last number of steps); the plot shows accuracy against the steps allowed.
"""

import argparse
import json
from pathlib import Path

import ddllm_vk
from ddllm_vk.quality import TaskScore, score
from ddllm_vk.tasks import TASKS


def measure(model: ddllm_vk.Model, steps: list[int], count: int) -> dict[int, list[TaskScore]]:
    """Scores of every task for every number of denoising steps allowed; the same questions each time."""
    scores: dict[int, list[TaskScore]] = {}
    for n in steps:
        config = ddllm_vk.GenerationConfig(max_denoising_steps=n)
        scores[n] = [score(model, task, count, config) for task in TASKS]
        print(f"{n:3d} steps  " + "  ".join(f"{s.task} {s.accuracy:.1%}" for s in scores[n]), flush=True)
    return scores


def table(scores: dict[int, list[TaskScore]]) -> str:
    """A Markdown table: a row a task, a column for every number of steps, then interval and mean steps of the last."""
    steps = list(scores)
    head = ["task", *(f"{n} steps" for n in steps), "95% interval", "mean steps a canvas"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for i, task in enumerate(TASKS):
        last = scores[steps[-1]][i]
        low, high = last.interval
        cells = [f"{100 * scores[n][i].accuracy:.1f}" for n in steps]
        lines.append(
            f"| {task} | " + " | ".join(cells) + f" | {100 * low:.1f} - {100 * high:.1f} | {last.mean_steps:.1f} |"
        )
    return "\n".join(lines)


def plot(scores: dict[int, list[TaskScore]], file: Path) -> None:
    """Accuracy against the steps allowed, a line a task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for i, task in enumerate(TASKS):
        axes.plot(list(scores), [100 * s[i].accuracy for s in scores.values()], marker="o", label=task)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(scores), [str(n) for n in scores])
    axes.set_xlabel("denoising steps allowed a canvas")
    axes.set_ylabel("exact answers, %")
    axes.grid(alpha=0.3)
    axes.legend(ncols=2)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--weights", choices=("stored", "f32", "q40"), default="stored")
    parser.add_argument("--count", type=int, default=500, help="held-out questions a task")
    parser.add_argument("--steps", type=lambda s: [int(n) for n in s.split(",")], default=[2, 4, 8, 16, 48])
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    scores = measure(ddllm_vk.load_model(args.model, weights=args.weights), args.steps, args.count)
    print(table(scores))
    if args.plot:
        plot(scores, args.plot)
    if args.json:
        shown = {
            n: [{**vars(s), "accuracy": s.accuracy, "interval": s.interval} for s in all_] for n, all_ in scores.items()
        }
        args.json.write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    main()
