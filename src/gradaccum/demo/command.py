"""The demo from the first file read to the last one written."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from gradaccum.demo.data import Corpus, length, load
from gradaccum.demo.model import Decoder, DecoderConfig
from gradaccum.demo.options import DemoOptions
from gradaccum.demo.plot import draw
from gradaccum.demo.results import DemoResult, RunResult
from gradaccum.demo.runs import WAYS, Probe, Timed, Way, probe, train, true_gradients
from gradaccum.demo.show import line, progress_bar, show
from gradaccum.errors import InputError

__all__ = ["run_demo"]


def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """Train in the three ways, print what came of it, and write it to `options.out`.

    Raises:
        InputError: if the device is not there, or the data has fewer functions than a batch.
    """
    device = _device(options.device)
    with progress_bar(console) as progress:
        steps = 2 + len(WAYS) * (1 + options.most_updates)
        task = progress.add_task("reading the standard library", total=steps)
        corpus = load(options.max_length)
        batches = corpus.batches(options.batch, options.most_updates, options.seed)
        start = _model(corpus, options).to(device)
        result = _measure(options, start, batches, progress, task)
    made = int(result.settings["updates"])
    if made < options.most_updates:
        console.print(f"Two minutes are up: {made} updates were made. --updates N makes N.")
    show(result, console)
    written = [options.out / "results.json", *draw(result, options.out)]
    written[0].write_text(result.to_json(), encoding="utf-8")
    console.print("Written: " + ", ".join(map(str, written)), highlight=False)
    return result


def _device(name: str) -> torch.device:
    device = torch.device(name)
    there = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= there:
        raise InputError(
            "demo-device",
            "there is no such CUDA device here.",
            got=f"--device {name}",
            expected=f"cpu, or cuda:0 to cuda:{there - 1}" if there else "cpu: torch sees no CUDA",
            do="gradaccum demo --device cpu",
        )
    return device


def _model(corpus: Corpus, options: DemoOptions) -> Decoder:
    torch.manual_seed(options.seed)
    return Decoder(DecoderConfig(len(corpus.tokenizer.words), options.max_length))


def _measure(
    options: DemoOptions,
    start: Decoder,
    batches: list[list[torch.Tensor]],
    progress: Progress,
    task: TaskID,
) -> DemoResult:
    begun = time.monotonic()
    progress.update(task, advance=1, description="the whole batch in float64")
    truth = true_gradients(start, batches[0])
    progress.advance(task)
    probes: list[Probe] = []
    for way in WAYS:
        progress.update(task, description=f"memory and distance: {way.title}")
        probes.append(probe(way, start, batches[0], options.budget, truth))
        progress.advance(task)
    rounds: list[tuple[Timed, ...]] = []
    progress.update(task, description="training")
    for timed in train(start, batches, options.budget):
        rounds.append(timed)
        text = line(
            len(rounds), [(way.title, *tick[:2]) for way, tick in zip(WAYS, timed, strict=True)]
        )
        progress.console.print(text, highlight=False)
        progress.advance(task, len(WAYS))
        if options.enough(len(rounds), time.monotonic() - begun):
            break
    tokens = sum(length(sample) for batch in batches[: len(rounds)] for sample in batch)
    whole, usual, ours = (
        _result(way, probed, ticks, tokens)
        for way, probed, ticks in zip(WAYS, probes, zip(*rounds, strict=True), strict=True)
    )
    return DemoResult(whole, usual, ours, settings=_settings(options, start, len(rounds)))


def _result(way: Way, probed: Probe, ticks: Sequence[Timed], tokens: int) -> RunResult:
    return RunResult(
        name=way.name,
        title=way.title,
        seconds=tuple(tick.seconds for tick in ticks),
        losses=tuple(tick.loss for tick in ticks),
        peak_bytes=probed.peak_bytes,
        tokens=tokens,
        padded=sum(tick.made.padded for tick in ticks),
        microbatches=tuple(tick.made.microbatches for tick in ticks),
        distance=probed.distance,
    )


def _settings(options: DemoOptions, start: Decoder, updates: int) -> dict[str, str | int]:
    return {
        "device": options.device,
        "updates": updates,
        "batch": options.batch,
        "seed": options.seed,
        "max_length": options.max_length,
        "budget": options.budget,
        "parameters": sum(p.numel() for p in start.parameters()),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
