"""Trains the bundled model from nothing. One command, seeded, resumable after a pause or a kill.

    python -m training.train --out RUN --minutes 110

Every example is trained on two successive denoising steps: first on a noised answer without self-conditioning, then on
what the sampler would make of that step's own result (or on the same canvas), conditioned on that result. Both steps
share one encoder pass. Two processes of one thread each average their gradients; matrices are trained by Muon, the
rest by AdamW. In the last part of the run the forward passes use Q40-rounded weights, with gradients passed straight
through to the float ones, so that the shipped Q40 file loses little.

RUN holds: pids (of the processes, to pause them with SIGSTOP), metrics.jsonl, curve.png, state.pt (to go on from),
latest/ (averaged weights every few minutes, as a checkpoint) and, at the end, final/.
"""

import argparse
import json
import os
import random
import shutil
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import Tokenizer
from torch import Tensor

from training import tokenizer as tokenizers
from training.data import SHAPES, Batch, batch, noised, sampler_step
from training.model import Passes, is_quantised, new_model, q40_rounded, trained_parameters

MUON_RATE, ADAM_RATE = 0.014, 0.0014
WARMUP = 60  # steps
BALANCE = 0.01  # weight of the routers' load-balance loss
REDUCED_SHARE = 0.88  # of the steps keep only the answers' rows
Q40_FROM = 0.8  # of the schedule: from here on the forward passes see Q40 weights
AVERAGE = 0.995  # decay of the averaged weights that are saved
LONG_SHARE = 0.46  # of a batch


class ActiveClock:
    """Seconds of work: a step that took far longer than usual (a paused process) counts as a usual one."""

    def __init__(self, elapsed: float):
        self.elapsed = elapsed
        self.usual = None
        self.last = time.monotonic()

    def tick(self) -> None:
        """Call once a step."""
        now = time.monotonic()
        took, self.last = now - self.last, now
        if self.usual is None or took < 20:
            self.usual = took if self.usual is None else 0.95 * self.usual + 0.05 * took
            self.elapsed += took
        else:
            self.elapsed += self.usual


class Optimiser:
    """Muon for matrices and AdamW for the rest, over gradients averaged between processes.

    Muon's orthogonalisation is dealt out among the processes, a group of equal shapes at a time.
    """

    def __init__(self, parameters: dict[str, Tensor], rank: int, world: int):
        self.rank, self.world = rank, world
        self.parameters = parameters
        self.muon = [name for name in parameters if is_quantised(name, parameters[name]) and "embed" not in name]
        self.adam = [name for name in parameters if name not in set(self.muon)]
        self.momentum = {name: torch.zeros_like(parameters[name]) for name in self.muon}
        self.first = {name: torch.zeros_like(parameters[name]) for name in self.adam}
        self.second = {name: torch.zeros_like(parameters[name]) for name in self.adam}
        self.count = 0

    def state(self) -> dict:
        return {"momentum": self.momentum, "first": self.first, "second": self.second, "count": self.count}

    def load(self, state: dict) -> None:
        self.momentum, self.first, self.second = state["momentum"], state["first"], state["second"]
        self.count = state["count"]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update; `factor` (0..1) scales both learning rates."""
        self.count += 1
        names = list(self.parameters)
        flat = torch.cat([self.parameters[name].grad.reshape(-1) for name in names])
        dist.all_reduce(flat)
        flat /= self.world
        parts = flat.split([self.parameters[name].numel() for name in names])
        gradients = {name: part.view_as(self.parameters[name]) for name, part in zip(names, parts, strict=True)}
        self._muon(gradients, MUON_RATE * factor)
        self._adam(gradients, ADAM_RATE * factor)

    def _muon(self, gradients: dict[str, Tensor], rate: float) -> None:
        groups = defaultdict(list)
        for name in self.muon:
            groups[self.parameters[name].shape[-2:]].append(name)
        updates = {}
        for shape, names in groups.items():
            for name in names:
                self.momentum[name].lerp_(gradients[name], 0.05)
            pieces = [gradients[name].lerp(self.momentum[name], 0.95).reshape(-1, *shape) for name in names]
            stack = torch.cat(pieces)
            share = -(-stack.shape[0] // self.world)
            mine = slice(self.rank * share, (self.rank + 1) * share)
            done = torch.zeros_like(stack)
            done[mine] = orthogonalised(stack[mine])
            updates[shape] = done
        flat = torch.cat([update.reshape(-1) for update in updates.values()])
        dist.all_reduce(flat)
        sizes = [update.numel() for update in updates.values()]
        for (shape, names), part in zip(groups.items(), flat.split(sizes), strict=True):
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for name, update in zip(names, part.split([self.parameters[name].numel() for name in names]), strict=True):
                self.parameters[name].add_(update.view_as(self.parameters[name]), alpha=-rate * scale)

    def _adam(self, gradients: dict[str, Tensor], rate: float, betas: tuple[float, float] = (0.9, 0.98)) -> None:
        for name in self.adam:
            first, second = self.first[name], self.second[name]
            first.lerp_(gradients[name], 1 - betas[0])
            second.lerp_(gradients[name].square(), 1 - betas[1])
            unbiased = (second / (1 - betas[1] ** self.count)).sqrt_().add_(1e-8)
            self.parameters[name].addcdiv_(first, unbiased, value=-rate / (1 - betas[0] ** self.count))


def orthogonalised(stack: Tensor, rounds: int = 5) -> Tensor:
    """Each matrix of `stack` [N, rows, columns] with its singular values moved to about 1 (Newton-Schulz, quintic)."""
    wide = stack.shape[1] <= stack.shape[2]
    x = stack if wide else stack.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x if wide else x.mT


def two_steps(passes: Passes, data: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of two denoising steps over one batch.

    Returns the loss to minimise, each example's mean cross-entropy over its answer on both steps [B, 2], and whether
    its whole answer was right after the second [B].
    """
    prefixes, balance = passes.encode(data.ids, data.real)
    canvas = noised(data.target)
    logits, first, balance_first = passes.decode(prefixes, data.real, canvas, data.rows, None, data.target)
    with torch.no_grad():
        temperature = 0.4 + 0.4 * torch.rand(len(data.tasks), 1, 1)
        scaled = logits.detach() / temperature
        stepped = torch.rand(len(data.tasks), 1) < 0.6
        canvas = torch.where(stepped, sampler_step(scaled, data.target, data.several), canvas)
    logits, second, balance_second = passes.decode(prefixes, data.real, canvas, data.rows, scaled, data.target)
    answer = data.weight > data.weight.amin(dim=1, keepdim=True)
    losses = torch.stack([first, second], dim=1).detach()
    mean = (losses * answer[:, None]).sum(2) / answer.sum(1, keepdim=True)
    right = ((logits.argmax(dim=-1) == data.target) | ~answer).all(dim=1)
    loss = ((first + second) * data.weight).sum() / 2
    return loss, BALANCE * (balance + balance_first + balance_second) / 3, mean, right


def write_checkpoint(model: torch.nn.Module, weights: dict[str, Tensor], tokenizer: Tokenizer, folder: Path) -> None:
    """Saves the model with these weights in `folder`, in the Hub's format; a reader never sees half of one."""
    parameters = trained_parameters(model)
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        model.save_pretrained(fresh)
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    tokenizers.save(tokenizer, fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def plot(metrics: Path, image: Path) -> None:
    """Draws loss and share of right answers by task over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # A resumed run reports some steps again: the last report of a step counts.
    by_step = {record["step"]: record for record in map(json.loads, metrics.read_text().splitlines())}
    records = [by_step[step] for step in sorted(by_step)]
    if len(records) < 2:
        return
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(9, 8), sharex=True)
    steps = [record["step"] for record in records]
    for task in sorted(records[-1]["tasks"]):
        points = [record["tasks"].get(task, {}) for record in records]
        upper.plot(steps, [point.get("loss", float("nan")) for point in points], label=task)
        lower.plot(steps, [100 * point.get("right", float("nan")) for point in points], label=task)
    upper.set(yscale="log", ylabel="cross-entropy a token (nats)", title="Training, by task")
    lower.set(ylabel="whole answers right at the second step (%)", xlabel="optimiser step")
    for axes in (upper, lower):
        for record in records:
            if record["q40"]:
                axes.axvline(record["step"], color="gray", linestyle=":", label="Q40 in the loop")
                break
        axes.grid(alpha=0.3)
    lower.legend(ncols=3, fontsize="small")
    figure.tight_layout()
    figure.savefig(image, dpi=110)
    pyplot.close(figure)


def work(rank: int, args: argparse.Namespace) -> None:
    """One of the training processes."""
    torch.set_num_threads(1)
    out: Path = args.out
    dist.init_process_group(
        "gloo", init_method=f"file://{out.resolve()}/rendezvous", rank=rank, world_size=args.processes,
        timeout=timedelta(hours=12),
    )  # fmt: skip
    everyone = [None] * args.processes
    dist.all_gather_object(everyone, os.getpid())
    if rank == 0:
        (out / "pids").write_text(" ".join(map(str, [os.getppid(), *everyone])) + "\n")
    tokenizer = tokenizers.build()
    model = new_model(args.seed).train()
    parameters = trained_parameters(model)
    optimiser = Optimiser(parameters, rank, args.processes)
    average = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    step, elapsed = 0, 0.0
    if (out / "state.pt").exists():
        state = torch.load(out / "state.pt")
        step, elapsed = state["step"], state["elapsed"]
        optimiser.load(state["optimiser"])
        average = state["average"]
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state["parameters"][name])
    # Compiling takes minutes a shape, so only what most steps use is compiled.
    passes = {True: Passes(model, args.compile), False: Passes(model, False)}
    size = args.batch // args.processes
    sizes = {"long": round(size * LONG_SHARE)}
    sizes["short"] = size - sizes["long"]

    def gradients(seed: str, reduced: bool, progress: float = 0.0) -> list[tuple[str, float, float]]:
        """Runs both kinds of batch forward and backward; returns (task, loss, right) of every example."""
        rng = random.Random(seed)
        torch.manual_seed(rng.getrandbits(63))
        seen = []
        for name, shape in SHAPES.items():
            data = batch(rng, tokenizer, shape, sizes[name], reduced, progress)
            loss, balance, mean, right = two_steps(passes[reduced], data)
            (loss / (size * 14) + balance * sizes[name] / size).backward()
            seen += zip(data.tasks, mean.mean(1).tolist(), right.float().tolist(), strict=True)
        return seen

    started = time.monotonic()
    gradients("warm up", reduced=True)  # compiles, before the clock starts
    print(f"process {rank} ready after {time.monotonic() - started:.0f} s", flush=True)
    dist.barrier()
    clock = ActiveClock(elapsed)
    recent: dict[str, list[tuple[float, float]]] = defaultdict(list)
    saved = reported = time.monotonic()
    reported_step = step
    while True:
        progress = torch.tensor(max(clock.elapsed / 60 / args.minutes, step / args.steps))
        dist.broadcast(progress, 0)
        progress = progress.item()
        if progress >= 1:
            break
        model.zero_grad(set_to_none=True)
        rounded = {}
        if progress >= Q40_FROM:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    if is_quantised(name, parameter):
                        rounded[name] = parameter.clone()
                        parameter.copy_(q40_rounded(parameter))
        reduced = random.Random(f"{args.seed}/{step}").random() < REDUCED_SHARE
        seen = gradients(f"{args.seed}/{step}/{rank}", reduced, progress)
        with torch.no_grad():
            for name, master in rounded.items():
                parameters[name].copy_(master)
        optimiser.step(min(1.0, (step + 1) / WARMUP) * (1 - progress))
        step += 1
        with torch.no_grad():
            decay = min(AVERAGE, (1 + step) / (10 + step))
            for name, parameter in parameters.items():
                average[name].lerp_(parameter, 1 - decay)
        clock.tick()
        if rank:
            continue
        for task, loss, right in seen:
            recent[task].append((loss, right))
        if step % args.report == 0:
            now = time.monotonic()
            tasks = {
                task: {"loss": sum(loss for loss, _ in seen) / len(seen), "right": sum(r for _, r in seen) / len(seen)}
                for task, seen in sorted(recent.items())
            }
            recent.clear()
            record = {"step": step, "minutes": clock.elapsed / 60, "progress": progress, "tasks": tasks}
            record["q40"] = bool(rounded)
            with (out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            shown = "  ".join(f"{task} {t['loss']:.3f} {100 * t['right']:.0f}%" for task, t in tasks.items())
            pace = (now - reported) / (step - reported_step)
            reported, reported_step = now, step
            print(f"{100 * progress:5.1f}%  step {step}  {pace:.2f} s a step  {shown}", flush=True)
        if time.monotonic() - saved > 60 * args.save_minutes:
            save(model, parameters, average, optimiser, step, clock.elapsed, tokenizer, out)
            saved = time.monotonic()
    if rank == 0:
        save(model, parameters, average, optimiser, step, clock.elapsed, tokenizer, out)
        write_checkpoint(model, average, tokenizer, out / "final")
        print(f"done: {step} steps, {clock.elapsed / 60:.1f} minutes, {out / 'final'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def save(model, parameters, average, optimiser, step, elapsed, tokenizer, out: Path) -> None:
    """Writes everything needed to go on, the averaged weights as a checkpoint, and the curve."""
    state = {
        "parameters": {name: parameter.detach() for name, parameter in parameters.items()},
        "average": average,
        "optimiser": optimiser.state(),
        "step": step,
        "elapsed": elapsed,
    }
    torch.save(state, out / "state.new")
    (out / "state.new").rename(out / "state.pt")
    write_checkpoint(model, average, tokenizer, out / "latest")
    plot(out / "metrics.jsonl", out / "curve.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; goes on if it holds a state.pt")
    parser.add_argument("--minutes", type=float, default=110, help="time budget, pauses not counted")
    parser.add_argument("--steps", type=int, default=12000, help="step budget: the schedule follows the nearer end")
    parser.add_argument("--batch", type=int, default=64, help="examples a step, over all processes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=int, default=50, help="steps between progress lines")
    parser.add_argument("--save-minutes", type=float, default=4)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rendezvous").unlink(missing_ok=True)
    mp.start_processes(work, (args,), args.processes, start_method="spawn")


if __name__ == "__main__":
    main()
