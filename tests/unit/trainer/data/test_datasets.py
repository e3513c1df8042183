"""The built-in data: what a sample is, what is held out, and what is said of files that do not fit."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.data.images import ImageFolder, RandomFlip, Subset, digits_images
from trainer.data.libraries import library
from trainer.data.rows import Rows, stack_pairs
from trainer.data.splits import complement, held_out
from trainer.data.synthetic import SyntheticImages, SyntheticTokens, synthetic_table
from trainer.data.tables import csv_table, sklearn_table
from trainer.data.tokens import TokenWindows, text_tokens, token_file, topics_tokens

# --- Held-out data ---------------------------------------------------------------------------------------------------


def test_the_same_samples_are_held_out_each_time_and_others_for_another_seed() -> None:
    assert held_out(100, 0.2, 0) == held_out(100, 0.2, 0)
    assert held_out(100, 0.2, 0) != held_out(100, 0.2, 1)
    assert len(held_out(100, 0.2, 0)) == 20


def test_of_each_class_the_same_part_is_held_out() -> None:
    labels = [0] * 50 + [1] * 10 + [2] * 4 + [3]

    chosen = held_out(65, 0.2, 0, labels)

    assert Counter(labels[index] for index in chosen) == {0: 10, 1: 2, 2: 1}  # a single one stays for training
    assert sorted([*chosen, *complement(chosen, 65)]) == list(range(65))


def test_data_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="1 samples cannot be split"):
        held_out(1, 0.5, 0)


# --- Tokens ----------------------------------------------------------------------------------------------------------


def test_each_token_of_a_text_is_predicted_once(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"abcdefghijk")
    windows = TokenWindows(text_tokens(tmp_path / "text.txt"), tokens_per_sample=3, vocab_size=256)

    pairs = [tuple(bytes(part.tolist()) for part in windows[index]) for index in range(len(windows))]

    assert pairs == [(b"abc", b"bcd"), (b"def", b"efg"), (b"ghi", b"hij")]
    assert windows[0][0].dtype == torch.int64


def test_the_last_windows_are_held_out() -> None:
    windows = TokenWindows(np.arange(101), tokens_per_sample=10, vocab_size=101)

    train, evaluation = windows.split(0.2)

    assert (len(train), len(evaluation)) == (8, 2)
    assert train[7][1].tolist() == list(range(71, 81))
    assert evaluation[0][1].tolist() == list(range(81, 91))
    with pytest.raises(IndexError):
        train[8]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_read_as_numbers_of_their_type(dtype: str, tmp_path: Path) -> None:
    tokens = np.array([1, 50_000, 3], dtype=dtype)
    tokens.tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "tokens.npy", tokens)

    assert token_file(tmp_path / "tokens.bin", dtype).tolist() == [1, 50_000, 3]
    assert token_file(tmp_path / "tokens.npy", "uint16").tolist() == [1, 50_000, 3]


def test_a_token_beyond_the_vocabulary_is_found_where_it_stands() -> None:
    windows = TokenWindows(np.array([1, 2, 300, 4]), tokens_per_sample=3, vocab_size=256)

    with pytest.raises(ValueError, match="token 300 stands between places 0 and 4"):
        windows[0]


def test_files_that_hold_no_tokens_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.save(tmp_path / "floats.npy", np.array([0.5]))

    with pytest.raises(FileNotFoundError, match=r"none\.txt is no file here \(the working folder is"):
        text_tokens(tmp_path / "none.txt")
    with pytest.raises(ValueError, match=r"empty\.txt is empty"):
        text_tokens(tmp_path / "empty.txt")
    with pytest.raises(ValueError, match="3 bytes, which uint16 numbers do not divide"):
        token_file(tmp_path / "odd.bin", "uint16")
    with pytest.raises(ValueError, match="holds 1 axes of float64"):
        token_file(tmp_path / "floats.npy", "uint16")
    with pytest.raises(ValueError, match="3 tokens are too few"):
        TokenWindows(np.arange(3), tokens_per_sample=3, vocab_size=9)


def test_the_help_topics_of_python_are_english_text() -> None:
    text = bytes(topics_tokens())

    assert len(text) > 300_000
    assert text.count(b" the ") > 1000


# --- Tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "num_classes"),
    [
        ("digits", (1797, 64), 10),
        ("breast_cancer", (569, 30), 2),
        ("wine", (178, 13), 3),
        ("iris", (150, 4), 3),
        ("diabetes", (442, 10), None),
    ],
)
def test_the_sets_of_scikit_learn(name: str, shape: tuple[int, int], num_classes: int | None) -> None:
    table = sklearn_table(name)
    train, evaluation = table.split(0.2, 0, torch.float32)

    assert table.features.shape == shape
    assert table.num_classes == num_classes
    assert len(train) + len(evaluation) == shape[0]
    assert len(evaluation) == pytest.approx(0.2 * shape[0], abs=2)
    assert train[0][0].dtype == torch.float32
    assert train[0][1].dtype == (torch.float32 if num_classes is None else torch.int64)


def table_file(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text)
    return path


def test_a_csv_file_for_classification_may_name_its_classes(tmp_path: Path) -> None:
    table = csv_table(table_file(tmp_path, "a,kind,b\n1,cat,2\n3,ant,4\n5,cat,6\n"), "kind", "classification")

    assert table.features.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert table.targets.tolist() == [1, 0, 1]
    assert table.num_classes == 2


def test_a_csv_file_for_regression_predicts_its_last_column(tmp_path: Path) -> None:
    table = csv_table(table_file(tmp_path, "a,b\n1,2.5\n3,-4e1\n\n"), None, "regression")

    assert table.features.tolist() == [[1], [3]]
    assert table.targets.tolist() == [2.5, -40]
    assert table.num_classes is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\nx,3\n", "line 3, column 'a': 'x' is no finite number"),
        ("a,b\n1,nan\n", "line 2, column 'b': 'nan' is no finite number"),
        ("a,b\n1\n", "line 2, has 1 columns; the header has 2"),
        ("a,b\n", "has 1 lines"),
    ],
)
def test_a_csv_file_that_is_wrong_is_told_where(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        csv_table(table_file(tmp_path, text), None, "regression")


def test_a_missing_file_or_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.csv is no file here"):
        csv_table(tmp_path / "none.csv", None, "regression")
    with pytest.raises(ValueError, match="no column 'price'; its columns are a, b"):
        csv_table(table_file(tmp_path, "a,b\n1,2\n"), "price", "regression")


# --- Images ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Two classes: two red pictures of 20×10 pixels, one blue of 5×5."""
    from PIL import Image

    for name, color, size in [
        ("red/1.png", "red", (20, 10)),
        ("red/2.JPG", "red", (20, 10)),
        ("blue/1.png", "blue", (5, 5)),
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", size, color).save(tmp_path / name)
    (tmp_path / "red" / "notes.txt").write_text("no image")
    return tmp_path


def test_a_folder_of_images_has_a_class_per_folder(image_folder: Path) -> None:
    images = ImageFolder(image_folder, 8, torch.float64)

    assert images.classes == ("blue", "red")
    assert images.labels == [0, 1, 1]
    pixels, label = images[0]
    assert (pixels.shape, pixels.dtype, label.item()) == ((3, 8, 8), torch.float64, 0)
    assert pixels[2].min() > 2 > pixels[0].max(), "it is blue"
    assert len(stack_pairs([images[index] for index in range(3)])[0]) == 3, "all have one size"


def test_hidden_folders_are_no_classes(image_folder: Path) -> None:
    (image_folder / ".ipynb_checkpoints").mkdir()

    assert ImageFolder(image_folder, 8, torch.float32).classes == ("blue", "red")


def test_pixels_of_16_bits_are_refused_and_not_cut_off(image_folder: Path) -> None:
    from PIL import Image

    Image.new("I;16", (5, 5), 40_000).save(image_folder / "blue" / "1.png")

    with pytest.raises(ValueError, match=r"1\.png has pixels of 16 or 32 bits \(mode I;16\).*Scale its values down"):
        ImageFolder(image_folder, 8, torch.float32)[0]


def test_a_flip_is_drawn_anew_for_each_sample() -> None:
    picture = torch.arange(4.0).view(1, 2, 2)
    flipped = RandomFlip(Subset([(picture, 0)], [0]))

    found = {tuple(flipped[0][0].flatten().tolist()) for _ in range(50)}

    assert found == {(0.0, 1.0, 2.0, 3.0), (1.0, 0.0, 3.0, 2.0)}


def test_folders_that_hold_no_images_are_refused(image_folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none is no folder here"):
        ImageFolder(image_folder / "none", 8, torch.float32)
    with pytest.raises(ValueError, match="holds no images: they are looked for one level down"):
        ImageFolder(image_folder / "red", 8, torch.float32)
    with pytest.raises(ValueError, match="classes that the training data lacks: red"):
        ImageFolder(image_folder, 8, torch.float32, classes=("blue",))
    (image_folder / "blue" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(ValueError, match=r"1\.png cannot be read as an image"):
        ImageFolder(image_folder, 8, torch.float32)[0]


def test_digits_are_scaled_up_when_asked() -> None:
    small, large = digits_images(8, torch.float32), digits_images(16, torch.float32)

    assert small[0][0].shape == (1, 8, 8)
    assert large[0][0].shape == (1, 16, 16)
    assert (small.inputs.min().item(), small.inputs.max().item()) == (-1, 1)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)

    with pytest.raises(ImportError, match=r"needs scikit-learn.*pip install 'gangline\[recipes\]'"):
        library("sklearn.datasets")


# --- Made-up data ----------------------------------------------------------------------------------------------------


def test_made_up_samples_are_the_same_each_time_and_held_out_ones_are_others() -> None:
    tokens = SyntheticTokens(100, 16, 50)
    images = SyntheticImages(20, 8, torch.float32)

    assert torch.equal(tokens[3][0], SyntheticTokens(100, 16, 50)[3][0])
    assert torch.equal(tokens[3][0][1:], tokens[3][1][:-1])
    assert torch.equal(tokens[7][0], SyntheticTokens(5, 16, 50, first=7)[0][0])
    assert torch.equal(images[12][0], SyntheticImages(5, 8, torch.float32, first=12)[0][0])
    assert (images[12][1].item(), images[12][0].shape) == (2, (3, 8, 8))
    assert isinstance(synthetic_table(50, torch.float64), Rows)
    assert torch.equal(synthetic_table(50, torch.float64).inputs, synthetic_table(50, torch.float64).inputs)
