"""Programs in the form of the old library's README run with the import line changed, and no more.

Each is a program of its own, whose text names `dataflux_pytorch`, as a user's would.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

if TYPE_CHECKING:
    from tests.compat.conftest import Bucket

MAP = """
from dataflux_pytorch import dataflux_mapstyle_dataset

dataset = dataflux_mapstyle_dataset.DataFluxMapStyleDataset(
    project_name="project",
    bucket_name="bucket",
    config=dataflux_mapstyle_dataset.Config(prefix="train/"),
)
name, size = dataset.objects[0]
seen = [each for each in dataset]
"""

ITERABLE = """
from dataflux_pytorch import dataflux_iterable_dataset

dataset = dataflux_iterable_dataset.DataFluxIterableDataset(
    project_name="project",
    bucket_name="bucket",
    config=dataflux_iterable_dataset.Config(prefix="train/"),
)
seen = []
for each in dataset:
    seen.append(each)
"""

DECODE = """
import io
import numpy
from PIL import Image
from dataflux_pytorch import {modules}

decode = lambda data: numpy.asarray(Image.open(io.BytesIO(data)))
dataset = {kind}(
    project_name="project",
    bucket_name="bucket",
    config=dataflux_mapstyle_dataset.Config(prefix="images/"),
    data_format_fn=decode,
)
seen = [each for each in dataset]
"""

RETRY = """
from dataflux_pytorch import dataflux_mapstyle_dataset
from google.cloud.storage.retry import DEFAULT_RETRY

dataset = dataflux_mapstyle_dataset.DataFluxMapStyleDataset(
    project_name="project",
    bucket_name="bucket",
    config=dataflux_mapstyle_dataset.Config(
        prefix="train/",
        max_composite_object_size=0,
        disable_compose=True,
        list_retry_config=DEFAULT_RETRY.with_deadline(300.0).with_delay(
            initial=1.0, multiplier=1.2, maximum=45.0
        ),
        download_retry_config=DEFAULT_RETRY.with_deadline(600.0).with_delay(
            initial=1.0, multiplier=1.5, maximum=90.0
        ),
    ),
)
seen = list(dataset)
"""

CHECKPOINT = """
import torch
from dataflux_pytorch import dataflux_checkpoint

checkpoint = dataflux_checkpoint.DatafluxCheckpoint(
    project_name="project", bucket_name="bucket"
)
model = torch.nn.Linear(3, 2)
with checkpoint.writer("checkpoints/epoch0.ckpt") as writer:
    torch.save(model.state_dict(), writer)
with checkpoint.reader("checkpoints/epoch0.ckpt") as reader:
    read = torch.load(reader)
other = torch.nn.Linear(3, 2)
other.load_state_dict(read)
same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
"""


def run(program: str) -> dict[str, Any]:
    """Run a program with its import line changed, and return what it left."""
    changed, num_lines = re.subn(
        r"^from dataflux_pytorch import",
        "from aioflux.compat.dataflux import",
        program,
        flags=re.MULTILINE,
    )
    assert num_lines == 1
    left: dict[str, Any] = {}
    exec(changed, left)
    return left


@pytest.mark.parametrize("program", [MAP, ITERABLE, RETRY], ids=["map", "iterable", "retry"])
def test_a_program_reads_the_bytes_of_its_objects(bucket: Bucket, program: str) -> None:
    keys = bucket.fill(12)
    bucket.put("other/000", b"other")
    left = run(program)
    assert left["seen"] == [f"data of {key}".encode() for key in keys]
    assert left["dataset"].objects == [(key, len(f"data of {key}")) for key in keys]
    if program is MAP:
        assert (left["name"], left["size"]) == ("train/000", 17)


@pytest.mark.parametrize(
    ("modules", "kind"),
    [
        ("dataflux_mapstyle_dataset", "dataflux_mapstyle_dataset.DataFluxMapStyleDataset"),
        (
            "dataflux_iterable_dataset, dataflux_mapstyle_dataset",
            "dataflux_iterable_dataset.DataFluxIterableDataset",
        ),
    ],
    ids=["map", "iterable"],
)
def test_a_program_decodes_images(bucket: Bucket, modules: str, kind: str) -> None:
    """The iterable dataset takes the config of the other one, as the README gives it."""
    images = [np.full((4, 5, 3), shade, dtype=np.uint8) for shade in (0, 100, 255)]
    for number, image in enumerate(images):
        file = io.BytesIO()
        Image.fromarray(image).save(file, format="png")
        bucket.put(f"images/{number}.png", file.getvalue())
    seen = run(DECODE.format(modules=modules, kind=kind))["seen"]
    assert [image.tolist() for image in seen] == [image.tolist() for image in images]


def test_a_program_saves_and_loads_a_checkpoint(bucket: Bucket) -> None:
    assert run(CHECKPOINT)["same"]
    assert bucket.server.keys("bucket") == ["checkpoints/epoch0.ckpt"]
