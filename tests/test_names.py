"""The public names: signatures, targets, importing, and the page that documents them."""

from __future__ import annotations

import inspect
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import cudnn_fused
from cudnn_fused.plan import Plan
from cudnn_fused.targets import SM90, SM100
from tests.cases import BY_NAME, CLASSES, OPERATION_NAMES, inputs_only, make_operands

ROOT = Path(__file__).parents[1]

# Parameters of the API that the Sm100 names mirror, in positional order; "=" marks a default of None, or the one given.
CONSTRUCTORS = {
    "conv3d_raw": "input packed_weight output",
    "conv3d_rmsnorm_silu": "input packed_weight bias gamma output residual= residual_bias= residual_output=",
    "conv3d_rmsnorm_silu_pad": "input packed_weight bias gamma padded_output cache_output history_frames=0 residual= "
    "residual_bias= residual_output=",
    "conv3d_bias_residual_pad": "input packed_weight bias residual padded_output residual_bias=",
    "causal_conv3d_with_cache": "input packed_weight padded_input cache_output output previous=",
    "rmsnorm_silu_pad": "input gamma padded_output cache_output input_bias= previous= residual= residual_bias= "
    "residual_output=",
}
FUNCTIONS = {
    "conv3d_raw": "input packed_weight current_stream=",
    "conv3d_rmsnorm_silu": "input packed_weight bias gamma residual= residual_bias= current_stream=",
    "conv3d_rmsnorm_silu_pad": "input packed_weight bias gamma history_frames=0 residual= residual_bias= "
    "current_stream=",
    "conv3d_bias_residual_pad": "input packed_weight bias residual residual_bias= current_stream=",
    "causal_conv3d_with_cache": "input packed_weight previous= current_stream=",
    "rmsnorm_silu_pad": "input gamma input_bias= previous= residual= residual_bias= current_stream= *save_input=False",
}
EXTENSIONS = {
    "conv3d_raw": {"leading_zero_frames", "absent_zero_frames"},
    "conv3d_rmsnorm_silu": {"leading_zero_frames", "absent_zero_frames"},
    "conv3d_rmsnorm_silu_pad": {"leading_zero_frames", "absent_zero_frames", "omit_zero_frames", "previous"},
    "conv3d_bias_residual_pad": {"leading_zero_frames", "absent_zero_frames"},
    "rmsnorm_silu_pad": {"omit_zero_frames"},
    "causal_conv3d_with_cache": set(),
}


def spelled(callable_: object, skip: set[str]) -> str:
    """A signature in the notation of the tables above."""
    words = []
    for name, parameter in inspect.signature(callable_).parameters.items():  # type: ignore[arg-type]
        if name in skip or name == "self":
            continue
        star = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default}".replace("None", "")
        words.append(f"{star}{name.removeprefix('sample_')}{default}")
    return " ".join(words)


def names_of(operation_name: str) -> list[tuple[type[Plan], object, bool]]:
    """Class, function, and whether they mirror the other API, for each of the three names."""
    base = CLASSES[operation_name].__name__
    return [
        (getattr(cudnn_fused, base), getattr(cudnn_fused, operation_name), False),
        (getattr(cudnn_fused, f"{base}Sm90"), getattr(cudnn_fused, f"{operation_name}_wrapper_sm90"), False),
        (getattr(cudnn_fused, f"{base}Sm100"), getattr(cudnn_fused, f"{operation_name}_wrapper_sm100"), True),
    ]


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_signatures(operation_name: str) -> None:
    for plan_class, function, mirrored in names_of(operation_name):
        extra = set() if mirrored else EXTENSIONS[operation_name]
        skip = extra | {f"sample_{name}" for name in extra}
        assert extra <= set(inspect.signature(function).parameters)  # type: ignore[arg-type]
        assert spelled(plan_class, skip) == CONSTRUCTORS[operation_name]
        assert spelled(function, skip) == FUNCTIONS[operation_name]
        executed = " ".join(
            word for word in CONSTRUCTORS[operation_name].split() if not word.startswith("history_frames")
        )
        assert spelled(plan_class.execute, skip) == f"{executed} current_stream="  # type: ignore[attr-defined]


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_mirrored_names_refuse_the_extensions(operation_name: str) -> None:
    plan_class, function, _ = names_of(operation_name)[2]
    for name in EXTENSIONS[operation_name]:
        with pytest.raises(TypeError, match=name):
            function(**{name: 0})  # type: ignore[operator]
        with pytest.raises(TypeError, match=name):
            plan_class(**{("" if name.endswith("_zero_frames") else "sample_") + name: 0})


def test_mirrored_names_lack_the_wide_norms() -> None:
    for operation_name in ("conv3d_rmsnorm_silu", "conv3d_rmsnorm_silu_pad"):
        plan_class, function, _ = names_of(operation_name)[2]
        assert plan_class.channels == ((160, 160), (160, 320), (320, 320))
        operands = inputs_only(
            BY_NAME[operation_name], make_operands(BY_NAME[operation_name], optional=False, Ci=320, Co=640)
        )
        with pytest.raises(ValueError, match="channels 320->640 are not supported; supported are 160->160"):
            function(**operands)  # type: ignore[operator]


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_targets_and_documentation(operation_name: str) -> None:
    for (plan_class, function, _), target in zip(names_of(operation_name), (None, SM90, SM100), strict=True):
        assert plan_class.target is target
        assert plan_class.operation is BY_NAME[operation_name]
        assert plan_class.__doc__
        assert "Returns:" in (function.__doc__ or "")
        assert getattr(cudnn_fused, function.__name__) is function  # type: ignore[attr-defined]
        assert getattr(cudnn_fused, plan_class.__name__) is plan_class


def test_everything_that_is_exported_exists() -> None:
    assert all(hasattr(cudnn_fused, name) for name in cudnn_fused.__all__)
    assert len(set(cudnn_fused.__all__)) == len(cudnn_fused.__all__)
    expected = {"__version__", "Result", "DeviceUnavailableError", "OperandTypeError"}
    for suffix in ("", "_sm90", "_sm100"):
        expected |= {f"pack_conv3d_weight{suffix}", f"pack_causal_conv3d_weight{suffix}"}
    for operation_name in OPERATION_NAMES:
        for plan_class, function, _ in names_of(operation_name):
            expected |= {plan_class.__name__, function.__name__}  # type: ignore[attr-defined]
    assert set(cudnn_fused.__all__) == expected


IMPORT = """
import sys, torch
for absent in ("cutlass", "cuda", "diffusers"):
    sys.modules[absent] = None
import cudnn_fused
assert not torch.cuda.is_initialized()
x = torch.zeros(1, 3, 3, 3, 160, dtype=torch.bfloat16)
w = cudnn_fused.pack_conv3d_weight(torch.zeros(160, 160, 3, 3, 3, dtype=torch.bfloat16))
assert cudnn_fused.conv3d_raw(x, w).shape == (1, 1, 1, 1, 160)
assert not torch.cuda.is_initialized()
"""


def test_import_needs_neither_gpu_nor_dsl() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_operand_tables_are_fresh() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    page = (ROOT / "docs" / "api.md").read_text()
    assert tables["main"](["--check"]) == 0, "run python docs/tables.py"
    assert tables["render"](page.replace("`packed_weight`", "`weight`", 1)) == page
