"""The scripts for clusters: Slurm with stub commands, Kubernetes by its schema, torchrun itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import torch
import yaml

import aioflux
from aioflux.checkpoint import Checkpointer
from aioflux.testing import GCSServer
from tests.rendezvous import rendezvous_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
SCHEMA = Path(__file__).parent / "kubernetes_schema.json"
"""The fields that the manifests use, of the OpenAPI schema of Kubernetes 1.37."""
MANIFESTS = {
    each["kind"]: each for each in yaml.safe_load_all((CLUSTER / "train.yaml").read_text())
}
STUBS = {
    # Two tasks, which receive the signals that the test sends to them, and their highest status.
    "srun": """
        while [[ "$1" == --* ]]; do shift; done
        for task in 0 1; do
            SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
            tasks+=($!)
        done
        status=0
        for task in "${tasks[@]}"; do
            wait "$task"
            ended=$?
            (( ended > status )) && status=$ended
        done
        exit "$status"
    """,
    "scontrol": """
        case "$1 $2" in
            "show hostnames") echo 127.0.0.1; echo 127.0.0.2 ;;
            requeue*) echo "requeued $2" ;;
            *) exit 1 ;;
        esac
    """,
}


# --- without processes ------------------------


@pytest.mark.parametrize("script", ["train.sbatch", "elastic.sh"])
def test_bash_accepts_the_script(script: str) -> None:
    checked = subprocess.run(["bash", "-n", CLUSTER / script], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def sbatch_options() -> dict[str, str]:
    found = re.findall(
        r"^#SBATCH --([\w-]+)(?:=(.*))?$", (CLUSTER / "train.sbatch").read_text(), re.MULTILINE
    )
    return dict(found)


def test_slurm_signals_the_tasks_long_before_the_end_of_the_job() -> None:
    options = sbatch_options()
    assert options["signal"] == "TERM@300"  # without "B:", which signals the batch script alone
    assert "requeue" in options
    script = (CLUSTER / "train.sbatch").read_text()
    assert grace_seconds(script) < 300


def grace_seconds(text: str) -> int:
    (seconds,) = re.findall(r"--grace-seconds[ =](\d+)", text)
    return int(seconds)


@pytest.mark.parametrize("kind", ["Service", "Job", "CronJob"])
def test_a_manifest_fits_the_schema_of_kubernetes(kind: str) -> None:
    schema = json.loads(SCHEMA.read_text())[kind]
    jsonschema.validate(MANIFESTS[kind], schema)
    broken = json.loads(json.dumps(MANIFESTS[kind]))
    broken["spec"]["unknown"] = 1
    with pytest.raises(jsonschema.ValidationError, match="unknown"):
        jsonschema.validate(broken, schema)


def test_pods_of_a_job_find_each_other_and_have_time_to_save() -> None:
    job, service = MANIFESTS["Job"], MANIFESTS["Service"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    name = job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert environment["WORLD_SIZE"] == str(spec["completions"]) == str(spec["parallelism"])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert environment["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert grace_seconds(" ".join(container["args"])) < pod["terminationGracePeriodSeconds"]
    (ignored,) = [each["onExitCodes"] for each in spec["podFailurePolicy"]["rules"][1:]]
    assert ignored["values"] == [os.EX_TEMPFAIL]
    assert ignored["containerName"] == container["name"]


def test_one_pod_fails_before_training_if_a_checkpoint_is_broken() -> None:
    (verify,) = MANIFESTS["Job"]["spec"]["template"]["spec"]["initContainers"]

    def status(index: int) -> int:
        environment = {"PATH": path, "JOB_COMPLETION_INDEX": str(index)}
        environment["STORAGE_EMULATOR_HOST"] = server.url
        return subprocess.run([*verify["command"], *verify["args"]], env=environment).returncode

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with GCSServer(buckets=("bucket",)) as server:
        assert status(0) == 0  # a new run
        with Checkpointer("gs://bucket/run-1", endpoint_url=server.url) as checkpointer:
            checkpointer.save(1, {"weight": torch.zeros(10)})
        assert status(0) == 0
        with aioflux.sync.open_store("gs://bucket", endpoint_url=server.url) as store:
            store.delete(next(key for key in server.keys("bucket") if key.endswith(".distcp")))
        assert (status(0), status(1)) == (1, 0)


# --- processes --------------------------------


class Training:
    """A training in other processes, whose lines the test reads."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        clean = {key: value for key, value in os.environ.items() if "SLURM" not in key}
        path = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**clean, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            | environment,
        )

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read lines up to the first one with the pattern."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line has {pattern!r}:\n{''.join(self.lines)}")

    def processes(self) -> dict[int, int]:
        """Return the processes of the ranks that have started last."""
        found = re.findall(r"rank (\d+) of \d+ \(process (\d+)\)", "".join(self.lines))
        return {int(rank): int(process) for rank, process in found}

    def end(self) -> int:
        assert self.process.stdout is not None
        with self.process.stdout:
            self.lines += self.process.stdout
        return self.process.wait()


@contextmanager
def training(command: list[str], environment: dict[str, str]) -> Iterator[Training]:
    started = Training(command, environment)
    try:
        yield started
    finally:
        # The group that this test started: a failed test leaves ranks behind.
        if started.process.poll() is None:
            os.killpg(started.process.pid, signal.SIGKILL)
        if started.process.stdout is not None and not started.process.stdout.closed:
            started.end()


@pytest.fixture
def cloud_environment() -> Iterator[dict[str, str]]:
    with GCSServer(buckets=("bucket",)) as server:
        for number in range(24):
            server.put("bucket", f"train/{number:02d}", bytes(range(number + 1)))
        yield {
            "STORAGE_EMULATOR_HOST": server.url,
            "DATA": "gs://bucket/train",
            "RUN": "gs://bucket/run",
        }


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables of a job of two tasks, and commands of Slurm that run them here."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}")
        (tmp_path / name).chmod(0o700)
    path = f"{tmp_path}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with rendezvous_port() as port:
        yield {
            "PATH": path,
            "SLURM_JOB_ID": str((port - 20000) % 40000),
            "SLURM_JOB_NODELIST": "n[0-1]",
            "SLURM_NTASKS": "2",
            "SLURM_SUBMIT_DIR": str(CLUSTER),
            "TMPDIR": str(tmp_path),
        }


def ranks_at_step(lines: list[str], step: int) -> list[str]:
    """Return each rank that started at a step, with the number of ranks."""
    # Ranks share the pipe: the end of a line may come after the beginning of another.
    pattern = rf"rank (\d of \d) \(process \d+\) at step {step}(?!\d)"
    return sorted(re.findall(pattern, "".join(lines)))


def last_step(lines: list[str]) -> tuple[int, int]:
    """Return the last epoch and step that rank 0 has printed."""
    epoch, step = re.findall(r"epoch (\d+) step (\d+):", "".join(lines))[-1]
    return int(epoch), int(step)


@pytest.mark.more
def test_a_slurm_job_that_one_task_learns_of_stops_saved_and_resumes(
    cloud_environment: dict[str, str], slurm: dict[str, str]
) -> None:
    """SIGTERM to one task stops both after the same step; the job is queued again and finishes."""
    environment = cloud_environment | slurm
    command = ["bash", str(CLUSTER / "train.sbatch"), "--batch-size", "2"]
    with training([*command, "--epochs", "100000"], environment) as first:
        first.wait_for("step 5:")
        os.kill(first.processes()[1], signal.SIGTERM)
        assert first.end() == 0, first.lines
    epoch, step = last_step(first.lines)
    assert f"requeued {slurm['SLURM_JOB_ID']}\n" in first.lines
    with training([*command, "--epochs", str(epoch + 2)], environment) as second:
        assert second.end() == 0, second.lines
    text = "".join(second.lines)
    assert len(ranks_at_step(second.lines, step)) == 2
    assert f"finished {epoch + 2} epochs at step {6 * (epoch + 2)}" in text  # 24 / (2 ranks * 2)
    assert "requeued" not in text


@pytest.mark.more
def test_torchrun_restarts_after_a_kill_and_resumes_with_more_ranks(
    cloud_environment: dict[str, str],
) -> None:
    def environment(port: int, ranks: int) -> dict[str, str]:
        own = {"NODES": "1", "RANKS_PER_NODE": str(ranks), "RENDEZVOUS": f"127.0.0.1:{port}"}
        return cloud_environment | own

    command = ["bash", str(CLUSTER / "elastic.sh"), "--batch-size", "2", "--save-every", "2"]
    with (
        rendezvous_port() as port,
        training([*command, "--epochs", "100000"], environment(port, 2)) as first,
    ):
        first.wait_for("step 9:")
        os.kill(first.processes()[1], signal.SIGKILL)
        first.wait_for(r"rank \d of 2 .* at step ([2-9]|\d\d)")  # the agent restarts both
        first.wait_for("epoch")
        os.kill(first.process.pid, signal.SIGTERM)
        assert first.end() != 0
    epoch, step = last_step(first.lines)
    with (
        rendezvous_port() as port,
        training([*command, "--epochs", str(epoch + 2)], environment(port, 3)) as second,
    ):
        assert second.end() == 0, second.lines
    text = "".join(second.lines)
    assert len(ranks_at_step(second.lines, step)) == 3
    assert f"finished {epoch + 2} epochs" in text


def test_ranks_come_from_torchrun_slurm_or_kubernetes() -> None:
    namespace: dict[str, Any] = {"__name__": "train"}
    exec(compile((CLUSTER / "train.py").read_text(), "train.py", "exec"), namespace)
    rank_variables = namespace["rank_variables"]
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    expected = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert rank_variables(slurm) == expected
    assert rank_variables({**slurm, "RANK": "0"}) == {}  # torchrun within a Slurm job
    assert rank_variables({"JOB_COMPLETION_INDEX": "5"}) == {"RANK": "5"}
