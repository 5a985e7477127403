"""What docs/fsspec.md shows is what happens: its Python blocks run in turn."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zarr

from aioflux.integrations.fsspec import GSFileSystem
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator

GUIDE = Path(__file__).parents[3] / "docs" / "fsspec.md"
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the blocks define: the later ones go on with it, on one server."""
    work = tmp_path_factory.mktemp("work")
    with GCSServer(buckets=("bucket",)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.setenv("HF_UPDATE_DOWNLOAD_COUNTS", "0")
        import datasets

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.chdir(work)
        GSFileSystem.clear_instance_cache()
        yield {"__name__": "guide"}
        for system in GSFileSystem._cache.values():
            zarr.core.sync.sync(system.aclose())  # connections on the loop of zarr
        GSFileSystem.clear_instance_cache()
        assert os.listdir(work) == []


def test_the_guide_has_examples() -> None:
    """Were the blocks not found, the test below would prove nothing."""
    assert len(BLOCKS) >= 8


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame")  # dask calls pandas so
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of blockcache
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_of_the_guide_runs(block: str, namespace: dict[str, Any]) -> None:
    exec(compile(block, str(GUIDE), "exec"), namespace)
