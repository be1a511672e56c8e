"""Write the pages under `docs/faults` from the catalogue: `python docs/faults_pages.py`."""

from __future__ import annotations

from pathlib import Path

from gradaccum.faults import CATALOGUE, Fault

HERE = Path(__file__).parent / "faults"


def page(fault: Fault) -> str:
    tools = ["the linter"] * fault.static + ["the doctor"] * fault.runtime
    seen = "seen by " + " and ".join(tools) if tools else "seen by neither linter nor doctor"
    return f"""\
# {fault.code}: {fault.title}

*{fault.severity.capitalize()}; {seen}.*

{fault.what}

{fault.reason}

**Mend.** {fault.mend}

## Wrong

```python
{fault.bad.rstrip()}
```

## Right

```python
{fault.good.rstrip()}
```

Both loops start from:

```python
{fault.prelude.rstrip()}
```
"""


def index() -> str:
    rows = "\n".join(
        f"| [{code}]({fault.name}.md) | {fault.title} | {fault.severity} |"
        for code, fault in CATALOGUE.items()
    )
    return f"# Faults\n\n| code | fault | severity |\n|---|---|---|\n{rows}\n"


def main() -> None:
    HERE.mkdir(exist_ok=True)
    (HERE / "index.md").write_text(index(), encoding="utf-8")
    for fault in CATALOGUE.values():
        (HERE / f"{fault.name}.md").write_text(page(fault), encoding="utf-8")


if __name__ == "__main__":
    main()
