"""The tutorial as a notebook, made from its page: `python docs/making/notebook.py`."""

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "guides" / "tutorial.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
_CODE = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> dict[str, Any]:
    """Each block of Python is a cell, and so is all text between two of them."""
    parts = _CODE.split(page)  # text and code take turns
    cells = [_cell(number, part.strip("\n")) for number, part in enumerate(parts) if part.strip()]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(number: int, source: str) -> dict[str, Any]:
    is_code = number % 2 == 1
    cell: dict[str, Any] = {
        "cell_type": "code" if is_code else "markdown",
        "id": f"part-{number}",
        "metadata": {},
    }
    if is_code:
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": source.splitlines(keepends=True)}


def as_text(page: str) -> str:
    """What the file of the notebook holds."""
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(as_text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
