"""The identity of weights: what separates two models, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from peercache.engines.weights import weights_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"

KINDS = ["chat", f"models--org--model/snapshots/{COMMIT}"]
"""A folder, and a snapshot of Hugging Face's cache."""


def model_in(folder: Path) -> Path:
    """Write a model's files; as in a snapshot, the weights may be elsewhere."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    weights = folder.parent / f"{folder.name}.blob"
    weights.write_bytes(b"w" * 10_000)
    (folder / "model.safetensors").symlink_to(weights)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "modeling_chat.py",
        "configuration_chat.py",
        "quant_config.json",
        "quant_model_description.json",
        "hf_quant_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "model.safetensors.index.json",
        "model.safetensors",
        "model-2.safetensors",
    ],
)
def test_a_file_that_changes_what_is_computed_separates(
    tmp_path: Path, kind: str, name: str
) -> None:
    """Also where the commit is the same: a snapshot is a folder that people edit."""
    before = weights_identity(str(model_in(tmp_path / kind)))

    (tmp_path / kind / name).write_text('{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}')

    assert weights_identity(str(tmp_path / kind)) != before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["README.md", "tokenizer.json", "chat_template.json", "generation_config.json"]
)
def test_a_file_that_changes_no_page_does_not(tmp_path: Path, kind: str, name: str) -> None:
    before = weights_identity(str(model_in(tmp_path / kind)))

    (tmp_path / kind / name).write_text("other")

    assert weights_identity(str(tmp_path / kind)) == before


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_files_at_another_place_are_the_same_weights(tmp_path: Path, kind: str) -> None:
    one, other = (model_in(tmp_path / host / kind) for host in ("a", "b"))

    assert weights_identity(str(one)) == weights_identity(str(other))


def test_a_snapshot_is_its_commit_too(tmp_path: Path) -> None:
    """Samples of the weights do not show every change that a commit makes."""
    snapshot = model_in(tmp_path / KINDS[1])
    later = model_in(snapshot.parent / ("f" * 40))

    assert weights_identity(str(snapshot)).startswith(f"org/model@{COMMIT} ")
    assert weights_identity(str(snapshot)) != weights_identity(str(later))


def test_weights_that_this_host_cannot_read_are_their_name() -> None:
    assert weights_identity("s3://bucket/model") == "s3://bucket/model"
    assert weights_identity("s3://bucket/model", "v2") == "s3://bucket/model@v2"
