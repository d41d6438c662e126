"""Write the stubs of the modules whose names are made from operand tables, for type checkers and editors.

python -m tools.make_stubs           rewrite the stubs
python -m tools.make_stubs --check   exit with 1 if one is stale
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

from cudnn_fused import cudnn_names, plans, sm90_names
from cudnn_fused.plan import Plan

MODULES = (plans, sm90_names, cudnn_names)
HEADER = f"# Written by tools/{Path(__file__).name}."
IMPORTS = {
    "Mapping": "from collections.abc import Mapping",
    "torch.": "import torch",
    "results.": "from cudnn_fused import results",
    "Channels": "from cudnn_fused.variants import Channels",
    "Plan": "from cudnn_fused.plan import Plan",
}
METHODS = ("__init__", "execute", "__call__")


def signature(function: object) -> str:
    """A function's signature as it is written in a stub."""
    return str(inspect.signature(function, eval_str=True)).replace("cudnn_fused.results.", "results.")  # type: ignore[arg-type]


def declarations(module: ModuleType) -> Iterator[str]:
    """The names that a module defines: annotated values, plan classes and functions."""
    annotations = inspect.get_annotations(module)
    for name, value in vars(module).items():
        if name in annotations:
            yield f"{name}: {annotations[name]}"
        elif name.startswith("_"):
            continue
        elif isinstance(value, type) and issubclass(value, Plan) and value.__module__ == module.__name__:
            methods = (f"    def {method}{signature(getattr(value, method))}: ..." for method in METHODS)
            yield "\n".join([f"class {name}(Plan):", *methods])
        elif isinstance(value, FunctionType) and (value.__module__ == module.__name__ or value.__name__ != name):
            yield f"def {name}{signature(value)}: ..."


def stub(module: ModuleType) -> str:
    """The stub of a module, formatted."""
    body = "\n".join(declarations(module))
    used = [line for sign, line in IMPORTS.items() if sign in body]
    text = "\n".join([HEADER, *used, "", body, ""])
    for arguments in (["check", "--select", "I", "--fix", "--quiet"], ["format"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(place(module)), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def place(module: ModuleType) -> Path:
    """Where the stub of a module is."""
    assert module.__file__
    return Path(module.__file__).with_suffix(".pyi")


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    stale = 0
    for module in MODULES:
        path, fresh = place(module), stub(module)
        if path.exists() and path.read_text(encoding="utf-8") == fresh:
            continue
        if arguments:
            print(f"{path.name} is stale: run python -m tools.make_stubs")
            stale = 1
        else:
            path.write_text(fresh, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
