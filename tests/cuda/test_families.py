"""Every architecture on a GPU: each kernel of its passes, whole passes and answers have the bits of the CPU."""

from pathlib import Path

import pytest

from engine.cuda.intrinsics import SIMULATED
from tests.families import FAMILIES, ONE_OF_EACH, write_quantized
from tests.oracle.models import write_gguf

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
if SIMULATED:
    pytest.skip("needs a real GPU", allow_module_level=True)

import engine
from engine import parity
from engine.devices import open_device
from engine.errors import DeviceError

pytestmark = pytest.mark.gpu

MODELS = [
    pytest.param(
        *values, marks=[pytest.mark.together(f"family {values[0]}"), *([pytest.mark.thorough] if more else [])]
    )
    for values, more in [
        *(((case.name, "Q8_0", "f16"), False) for case in ONE_OF_EACH.values()),
        *(((name, "F32", "f32"), name == ONE_OF_EACH[case.architecture].name) for name, case in FAMILIES.items()),
    ]
]


@pytest.mark.parametrize(("name", "quant", "cache_type"), MODELS)
@pytest.mark.begin(-1)
def test_parity(name: str, quant: str, cache_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _ = engine.load  # chooses the folder of compiled kernels
    try:
        open_device("cuda")
    except DeviceError as error:
        pytest.skip(str(error))
    path, case = tmp_path / "m.gguf", FAMILIES[name]
    if quant == "F32":
        write_gguf(case, path)
    else:
        write_quantized(case, path, quant)
    status = parity.main([str(path), "-p", "150", "-n", "24", "-ct", cache_type])
    out, err = capsys.readouterr()
    assert status == 0, out + err
    assert "equal, bit for bit" in out
