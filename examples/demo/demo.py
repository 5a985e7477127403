"""Train from a bucket during faults and a SIGKILL; compare with a training that had neither.

    python examples/demo/demo.py      needs no cloud account; writes demo.html

`train` is the training, with a dataset and checkpoints: the part to copy. It runs in a process of
its own, which is killed and started again. The main process has a GCS server in its memory, which
injects the faults, and compares the losses.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from page import FaultResult, Results, write_page
from PIL import Image, ImageDraw

import aioflux
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from aioflux.data import Sample

BUCKET = "gs://demo"
PIXELS = 384
NUM_CORNERS = {"circle": 60, "triangle": 3, "square": 4}
"""The classes of the images."""
BATCH_SIZE = 32
FAULTS: dict[int, tuple[str, dict[str, Any]]] = {
    1: ("response 503", {"status": 503, "times": 100}),
    2: ("flipped byte", {"flip_at": "random", "times": 2}),
    3: ("stalled body", {"stall_at": 40_000, "times": 2}),
}
"""Name of the faults, and arguments of `server.faults.add`, by the epoch after which they occur."""
KILL_EPOCH = 3.5
"""Number of epochs before the SIGKILL."""
NEXT = """
The page with all results: {page}

Next:
  {python} {examples}/image_segmentation/segmentation.py --uri file:///tmp/run-1
      kill it with `kill -9`, and start it again
  {python} {examples}/checkpoint_async/checkpoint_async.py --uri gs://YOUR-BUCKET/tmp
      with a real bucket
  {python} -m aioflux serve --bucket bucket
      this server, for your own programs and tests"""
BEGUN = time.perf_counter()


# --- the clients -------------------------------------------------------------------------


def train(url: str, run: str, num_epochs: int, save_every: int) -> None:
    """Train from the last commit of the run, if there is one, and save in the background."""
    import torch  # only this process needs it
    from torch import nn

    from aioflux.checkpoint import Checkpointer, TrainingState
    from aioflux.data import IterableDataset, loader

    def block(num_in: int, num_out: int) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(num_in, num_out, 3, padding=1)
        return convolution, nn.BatchNorm2d(num_out), nn.ReLU(), nn.MaxPool2d(2)

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the other core is for the server and the decoders
    blocks = (*block(3, 8), *block(8, 16), *block(16, 32), *block(32, 64), nn.Flatten())
    model = nn.Sequential(*blocks, nn.Linear(576, 2048), nn.ReLU(), nn.Linear(2048, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    # Objects are listed once, and read in another order in each epoch, up to 256 at a time.
    images = IterableDataset(
        f"{BUCKET}/images",
        transform=decode,
        shuffle=True,
        seed=0,
        timeouts=aioflux.Timeouts(progress_seconds=2),
        endpoint_url=url,
    )
    batches = loader(images, batch_size=BATCH_SIZE, num_threads=2)
    training = TrainingState(model, optimizer, dataset=batches)  # with the position in the data
    uri = f"{BUCKET}/{run}"
    with Checkpointer(uri, every=save_every, keep_last=2, endpoint_url=url) as checkpoints:
        if checkpoints.latest() is not None:
            checkpoints.load(into=training)
        step = first_step = checkpoints.loaded_step or 0
        report(resumed=step)
        for epoch in range(training.values.get("epoch", 0), num_epochs):
            images.set_epoch(epoch)
            training.values = {"epoch": epoch}
            for pixels, labels in batches:
                logits = model((pixels.permute(0, 3, 1, 2) - 128.0) / 64)
                loss = nn.functional.cross_entropy(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step == first_step + 1:  # the optimizer has all of its tensors now
                    checkpoints.prepare(training)  # so that the first save blocks no longer
                if checkpoints.should_save(step):
                    checkpoints.save_async(step, training)  # returns when the state is copied
                stats = images.stats
                counts = {"retries": stats.num_retries, "skipped": stats.num_skipped}
                report(step=step, loss=loss.item(), objects=stats.num_objects, **counts)
    with Checkpointer(uri, endpoint_url=url) as checkpoints:
        for save in checkpoints.history():
            times = {"blocked": save.staged_seconds, "upload": save.upload_seconds}
            report(saved=save.step, num_bytes=save.num_bytes, **times)


def decode(sample: Sample) -> tuple[NDArray[np.uint8], int]:
    """Return the pixels, and the number of the class that the key names."""
    image = Image.open(io.BytesIO(sample.data))
    image.draft("RGB", (PIXELS // 8, PIXELS // 8))  # scales down while it decodes
    name = sample.key.partition("-")[2].removesuffix(".jpg")
    return np.array(image), list(NUM_CORNERS).index(name)


def read(url: str) -> None:
    """Read images, without training."""
    with aioflux.sync.open_store(f"{BUCKET}/images", endpoint_url=url) as store:
        metas = store.list_all()[:256]
        report_rate(lambda: sum(1 for _ in store.get_many(metas)))


def read_with_google(url: str) -> None:
    """Do the same with google-cloud-storage, if it is installed."""
    try:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage
    except ModuleNotFoundError:
        return
    options = {"api_endpoint": url}
    client = storage.Client("demo", AnonymousCredentials(), client_options=options)
    blobs = list(client.list_blobs("demo", prefix="images/"))[:256]
    with ThreadPoolExecutor(8) as threads:  # more threads are not faster
        report_rate(lambda: sum(1 for _ in threads.map(storage.Blob.download_as_bytes, blobs)))


CLIENTS = {"train": train, "aioflux": read, "google-cloud-storage": read_with_google}


# --- processes of clients ----------------------------------------------------------------


def report(**values: float) -> None:
    """Send values to the main process, as one line."""
    print(json.dumps(values), flush=True)


def report_rate(read_all: Callable[[], int]) -> None:
    """Report the objects per second of repeated reads, with open connections."""
    read_all()
    num_objects, begun = 0, time.perf_counter()
    while (seconds := time.perf_counter() - begun) < 0.5:
        num_objects += read_all()
    report(objects_per_second=num_objects / seconds)


@contextmanager
def started(client: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a client in a process of its own, which does not outlive the `with` block."""
    with subprocess.Popen(  # noqa: S603  this program
        [sys.executable, __file__, client, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C reaches only the main process
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def reports(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Yield the reports of a client with their time, until it exits or is killed."""
    assert process.stdout is not None
    for line in process.stdout:
        yield {"time": time.perf_counter() - BEGUN, **json.loads(line)}
    if process.wait() not in (0, -signal.SIGKILL):
        raise SystemExit("the demo failed; see the error above")


# --- the main process --------------------------------------------------------------------


def made_images(num_images: int) -> Iterator[tuple[str, bytes]]:
    """Yield keys and JPEGs of about 100 KiB: a shape in noise, named in the key."""
    noise = np.random.default_rng(0).normal(128, 50, (2 * PIXELS, 2 * PIXELS)).clip(0, 255)
    background = Image.fromarray(noise.astype(np.uint8)).convert("RGB")
    rng = random.Random(0)  # noqa: S311  not for secrets
    for number in range(num_images):
        name = rng.choice(list(NUM_CORNERS))
        left, top = rng.randrange(PIXELS), rng.randrange(PIXELS)
        image = background.crop((left, top, left + PIXELS, top + PIXELS))
        radius = rng.uniform(60, 120)
        x, y = (rng.uniform(radius, PIXELS - radius) for _ in "xy")
        color = tuple(rng.choice((rng.randrange(70), rng.randrange(186, 256))) for _ in "rgb")
        draw, angle = ImageDraw.Draw(image), rng.randrange(360)
        draw.regular_polygon((x, y, radius), NUM_CORNERS[name], angle, fill=color)
        file = io.BytesIO()
        image.save(file, "JPEG", quality=93)
        yield f"{number:05d}-{name}.jpg", file.getvalue()


def say(text: str) -> None:
    """Print a line with the time since the start."""
    print(f"{time.perf_counter() - BEGUN:5.1f} s  {text}", flush=True)


def watch(
    server: GCSServer, results: Results, run: str, plan: Mapping[int, tuple[str, dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Yield the reports of a training, and inject the faults that are planned for its steps."""
    earlier = None
    with started("train", server.url, run, results.num_epochs, results.save_every) as trainer:
        for message in reports(trainer):
            yield message
            if message.get("resumed"):
                say(f"step {message['resumed']:3}  a new process resumes from the last commit")
            step = message.get("step")
            if step and step % results.save_every == 0:
                if earlier is not None:
                    rate = (step - earlier["step"]) / (message["time"] - earlier["time"])
                    speed = f"{rate * BATCH_SIZE:4.0f} images/s"
                    say(f"step {step:3}  loss {message['loss']:.3f}  {speed}")
                earlier = message
            if step in plan:
                inject(server, results, message, *plan[step])
            if message is results.killed:
                trainer.kill()


def inject(
    server: GCSServer, results: Results, message: dict[str, Any], name: str, options: dict[str, Any]
) -> None:
    """Add a fault to the server, or decide to kill the training; show what became of the last."""
    step = message["step"]
    if results.faults:
        results.faults[-1].end(message, server.faults.injected)
        say(f"step {step:3}  survived: {results.faults[-1]}")
    if name == "SIGKILL":
        say(f"step {step:3}  SIGKILL, right after the start of a save")
        results.killed = message
    else:
        fault = server.faults.add("objects.media", key="images/*", **options)
        results.faults.append(FaultResult(name, fault.kind, message))


def run(server: GCSServer, results: Results) -> None:
    """Upload the images, run all clients, and collect their reports."""
    with aioflux.sync.open_store(f"{BUCKET}/images", endpoint_url=server.url) as store:
        sizes = [meta.size for meta in store.put_many(made_images(results.num_images))]
    results.image_bytes = sum(sizes) // len(sizes)
    say(f"made and stored {len(sizes)} images of {results.image_bytes / 1024:.0f} KiB")
    for name in ("aioflux", "google-cloud-storage"):
        with started(name, server.url) as process:
            for message in reports(process):
                results.rates[name] = message["objects_per_second"]
                say(f"read by {name}: {results.rates[name]:,.0f} objects/s")

    say("a training without faults")
    results.clean = list(watch(server, results, "clean", {}))

    say("the same training, with faults and a SIGKILL")
    num_steps, save_every = results.num_steps // results.num_epochs, results.save_every
    plan = {epoch * num_steps - 1: fault for epoch, fault in FAULTS.items()}
    plan[round(KILL_EPOCH * num_steps / save_every) * save_every] = ("SIGKILL", {})
    for plan_of_process in (plan, {}):
        results.faulty += watch(server, results, "faulty", plan_of_process)


def main() -> None:
    """Run the demo, or one of its clients."""
    if sys.argv[1:] and sys.argv[1] in CLIENTS:
        # Standard input is a pipe from the main process: end when that has ended.
        threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
        CLIENTS[sys.argv[1]](*(int(text) if text.isdecimal() else text for text in sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=640, help="number of images")
    parser.add_argument("--epochs", type=int, default=5, help="number of epochs of each training")
    options = parser.parse_args()
    if options.images < 2 * BATCH_SIZE or options.epochs <= KILL_EPOCH:
        parser.error(f"the faults need {2 * BATCH_SIZE} images and {KILL_EPOCH + 0.5:.0f} epochs")
    if not os.access(".", os.W_OK):
        parser.error("the current directory must be writable, for demo.html")
    results = Results(options.images, options.epochs, BATCH_SIZE)
    say("a GCS server in memory is started")
    with GCSServer(buckets=("demo",), md5=False) as server:
        run(server, results)
    results.seconds = time.perf_counter() - BEGUN
    say(results.verdict)
    page, here = write_page(Path("demo.html"), results), f"{Path.cwd()}{os.sep}"
    paths = {"python": sys.executable, "examples": str(Path(__file__).parents[1])}
    print(NEXT.format(page=page, **{name: at.removeprefix(here) for name, at in paths.items()}))
    if not results.is_equal:
        raise SystemExit("the demo failed")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
