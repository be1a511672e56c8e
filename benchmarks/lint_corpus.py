"""Precision and recall of the linter over scripts that were judged by hand.

    python benchmarks/lint_corpus.py MANIFEST FOLDER

MANIFEST holds one judged file a line; FOLDER holds the files as `owner+name@commit/path`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from gradaccum.faults import CATALOGUE
from gradaccum.lint.collector import paused
from gradaccum.lint.files.program import Program
from gradaccum.lint.judge import judge

CODES = {
    "zero-grad-missing": ("GA101",),
    "zero-grad-between-backward-and-step": ("GA103", "GA102"),
    "loss-not-scaled": ("GA201",),
    "loss-misscaled": ("GA202",),
    "step-without-backward": ("GA301",),
    "partial-window-dropped": ("GA302",),
    "backward-without-step": ("GA302",),
    "off-by-one-modulo": ("GA303",),
    "optimizer-in-loop": ("GA304",),
    "scheduler-per-microbatch": ("GA305",),
    "step-per-microbatch": ("GA102",),
    "update-outside-no_grad": ("GA308",),
    "clip-every-microbatch": ("GA401",),
    "clip-before-unscale": ("GA402",),
    "running-loss-keeps-graph": ("GA501",),
    "retain-graph-unneeded": ("GA502",),
    "no-no-sync": ("GA601",),
    "stale-gradient": ("GA104",),
}
NEAR = 3
PART = 24
"""Files that one process lints in one go."""


def lint_tree(
    folder: str, paths: list[str], wanted: list[str]
) -> list[tuple[str, list[tuple[str, int, str]], float]]:
    root = Path(folder)
    program = Program({path: (root / path).read_bytes() for path in paths})
    rows = []
    for path in wanted:
        start = time.process_time()
        with paused():
            module = program.load(path)
            hits = [hit for hit in (judge(program, module) if module else []) if hit.path == path]
        hits = [hit for hit in hits if hit.code not in CATALOGUE or CATALOGUE[hit.code].usual]
        rows.append(
            (path, [(h.code, h.line, h.message) for h in hits], time.process_time() - start)
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("manifest")
    parser.add_argument("folder")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    labels: dict[tuple[str, str], dict] = {}
    trees: dict[str, list[str]] = defaultdict(list)
    for line in Path(options.manifest).read_text().splitlines():
        row = json.loads(line)
        tree = f"{row['repo'].replace('/', '+')}@{row['commit'][:8]}"
        labels[tree, row["path"]] = row
        trees[tree].append(row["path"])
    start = time.perf_counter()
    with ProcessPoolExecutor(2) as pool:
        jobs = [
            (
                tree,
                pool.submit(lint_tree, str(Path(options.folder) / tree), paths, paths[at::parts]),
            )
            for tree, paths in sorted(trees.items(), key=lambda item: -len(item[1]))
            # a large repository in several parts, so that both processors have work to the end
            for parts in [1 + len(paths) // PART]
            for at in range(parts)
        ]
        results = defaultdict(list)
        for tree, job in jobs:
            results[tree].extend(job.result())
    print(f"{sum(map(len, trees.values()))} files in {time.perf_counter() - start:.1f} s")
    table: dict[str, Counter] = defaultdict(Counter)
    by_repo: dict[str, Counter] = defaultdict(Counter)
    by_file: dict[tuple[str, str], Counter] = defaultdict(Counter)
    for tree, rows in results.items():
        for path, hits, _ in rows:
            _score(tree, path, hits, labels[tree, path], table, by_repo, by_file, options.quiet)
    _print(table, by_repo, by_file)
    print(
        f"{sum(cost for rows in results.values() for _, _, cost in rows):.1f} s of processor time"
    )
    slow = sorted(((cost, tree, path) for tree, rows in results.items() for path, _, cost in rows))
    for cost, tree, path in slow[-3:]:
        print(f"  {cost:.2f} s {tree}/{path}")
    return 0


def _score(tree, path, hits, row, table, by_repo, by_file, quiet) -> None:
    pending = list(row["true_findings"])
    own = {line for first, last in row["lines_of_loop"] for line in range(first, last + 1)}
    for code, line, message in hits:
        say = ""
        wanted = next(
            (
                item
                for item in pending
                if code in CODES[item["rule"]]
                and (abs(item["line"] - line) <= NEAR or (item["line"] in own and line in own))
            ),
            None,
        )
        banned = [item for item in row["must_not_flag"] if item["line"] == line]
        open_ = [item for item in row["debatable"] if code in CODES.get(item["rule"], ())]
        if wanted is not None:
            pending.remove(wanted)
            kind = "true"
        elif any(code in CODES[item["rule"]] and abs(item["line"] - line) <= NEAR
                 for item in row["true_findings"]):  # fmt: skip
            kind = "again"
        elif open_:
            kind = "debatable"
        else:
            kind = "false"
        if banned and kind != "true":
            say = f"  MUST NOT: {banned[0]['why']}"
            table[code]["banned"] += 1
        table[code][kind] += 1
        by_repo[tree][kind] += 1
        by_file[tree, path][kind] += 1
        if (kind in ("false", "debatable") and not quiet) or say:
            print(f"{kind:9} {row['review']:8} {code} {tree}/{path}:{line} {message[:90]}{say}")
    for item in pending:
        code = CODES[item["rule"]][0]
        table[code]["missed"] += 1
        by_repo[tree]["missed"] += 1
        by_file[tree, path]["missed"] += 1
        if not quiet:
            print(f"missed    {row['review']:8} {code} {tree}/{path}:{item['line']} {item['why']}")


def _print(table, by_repo, by_file) -> None:
    total = Counter()
    for code in sorted(table):
        total.update(table[code])
        print(code, dict(table[code]))
    found, missed, wrong = total["true"], total["missed"], total["false"]
    print(f"recall {found / max(1, found + missed):.3f}  "
          f"precision {found / max(1, found + wrong):.3f}  must-not {total['banned']}")  # fmt: skip
    for name, groups in (("file", by_file), ("repository", by_repo)):
        positive = [group for group in groups.values() if group["true"] + group["missed"]]
        flagged = [group for group in groups.values() if group["true"] + group["false"]]
        recall = sum(g["true"] / (g["true"] + g["missed"]) for g in positive) / max(
            1, len(positive)
        )
        precision = sum(g["true"] / (g["true"] + g["false"]) for g in flagged) / max(
            1, len(flagged)
        )
        print(f"mean by {name}: recall {recall:.3f}  precision {precision:.3f}")


if __name__ == "__main__":
    sys.exit(main())
