"""The loaders on data made here: whole files are read exactly, damaged or hostile ones are refused."""

import hashlib
import json
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_data import make_cifar, make_folder, make_ptb, write_sums

from rtopk.studies import bench, tasks
from rtopk.studies.tasks import datasets
from rtopk.studies.tasks.datasets import DataError, data_dir, find
from rtopk.studies.tasks.images import Files, centre_crop, image_folder, random_resized_crop


@pytest.mark.parametrize("binary", [False, True])
def test_cifar_is_read_exactly(tmp_path, binary):
    pixels, labels = make_cifar(tmp_path, per_batch=4, binary=binary)
    train, test = datasets.cifar10_from(tmp_path / datasets.CIFAR_FOLDERS[binary])
    assert torch.equal(train[0], torch.from_numpy(pixels[:20]).view(20, 3, 32, 32))
    assert train[1].tolist() == labels[:20]
    assert torch.equal(test[0], torch.from_numpy(pixels[20:]).view(4, 3, 32, 32))
    assert test[1].tolist() == labels[20:]


@pytest.mark.parametrize("binary", [False, True])
def test_one_wrong_byte_is_refused(tmp_path, binary):
    make_cifar(tmp_path, per_batch=4, binary=binary)
    folder = tmp_path / datasets.CIFAR_FOLDERS[binary]
    path = folder / ("data_batch_3.bin" if binary else "data_batch_3")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"data_batch_3.* is damaged or not the original: md5"):
        datasets.cifar10_from(folder)


def test_made_data_without_its_own_sums_is_refused(tmp_path):
    make_cifar(tmp_path, per_batch=4)
    (tmp_path / datasets.CIFAR_FOLDERS[0] / "MD5SUMS").unlink()
    with pytest.raises(DataError, match=f"expected {datasets.PYTHON['data_batch_1']}"):
        datasets.cifar10_from(tmp_path / datasets.CIFAR_FOLDERS[0])


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_runs_no_code(tmp_path, protocol):
    raw = pickle.dumps({b"data": Bomb(str(tmp_path / "bang")), b"labels": [1]}, protocol=protocol)
    with pytest.raises(DataError, match=r"asks for (posix|nt|os)\.mkdir; only arrays, lists and strings"):
        datasets.read_python(raw, "data_batch_1")
    assert not (tmp_path / "bang").exists()


@pytest.mark.parametrize(
    "name", ["cnumpy.core.multiarray\n_reconstruct\n", "c_codecs\nencode\n", "cnumpy\nndarray\n"]
)
@pytest.mark.parametrize("state", ["(dS'__defaults__'\n(NNtsS'raw'\nS'x'\ns", "(N(dS'__defaults__'\nNst"])
def test_a_pickle_cannot_alter_what_it_names(name, state):
    """BUILD sets attributes of what is on the stack: of our stand-ins there is nothing to set."""
    with pytest.raises(DataError):
        datasets.read_python((name + state + "b.").encode(), "data_batch_1")
    assert not any(hasattr(value, "__defaults__") for value in datasets._ADMITTED.values())
    assert datasets._Array.raw == b""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({b"data": np.zeros((2, 3072), np.float32), b"labels": [1, 2]}, "array must be of bytes"),
        ({b"data": np.zeros((2, 3072), object), b"labels": [1, 2]}, "array must be of bytes"),
        ({b"data": np.zeros((2, 3071), np.uint8), b"labels": [1, 2]}, "3072 bytes for each label"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, "labels must be 0 to 9"),
        ({b"data": [1, 2], b"labels": [1]}, "data must be an array"),
        ({b"labels": [1]}, "not a CIFAR-10 batch"),
        ([], "not a CIFAR-10 batch"),
    ],
)
def test_pickles_of_other_things_are_refused(content, message):
    with pytest.raises(DataError, match=message):
        datasets.read_python(pickle.dumps(content, protocol=2), "data_batch_1")


def test_truncated_files_are_refused():
    raw = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]}, protocol=2)
    for cut in (0, 1, 50, len(raw) - 1):
        with pytest.raises(DataError):
            datasets.read_python(raw[:cut], "data_batch_1")
    with pytest.raises(DataError, match="records of 3073 bytes, got 3072"):
        datasets.read_binary(bytes(3072), "test_batch.bin")


def test_ptb_numbers_words_by_frequency(tmp_path, monkeypatch):
    monkeypatch.setenv("RTOPK_DATA", str(tmp_path))
    make_ptb(tmp_path, train=" b a b\n b <unk> a\n", valid=" a c\n", test=" b\n")
    text = datasets.ptb()
    names = ["b", "<eos>", "a", "<unk>"]  # 3, 2, 2, 1 times; ties by the alphabet
    assert [names[i] for i in text.train] == ["b", "a", "b", "<eos>", "b", "<unk>", "a", "<eos>"]
    assert [names[i] for i in text.validation] == ["a", "<unk>", "<eos>"]
    assert text.lines.tolist() == [0, 4]
    few = datasets.ptb(3)  # <unk> and the two most frequent
    assert few.words == 3
    assert few.train.tolist() == [1, 0, 1, 2, 1, 0, 0, 2]


def test_ptb_refuses_damage(tmp_path, monkeypatch):
    monkeypatch.setenv("RTOPK_DATA", str(tmp_path))
    make_ptb(tmp_path, train=" a b\n", valid=" a\n", test=" b\n")
    (tmp_path / "ptb" / "ptb.valid.txt").write_text(" a a\n")
    with pytest.raises(DataError, match=r"ptb.valid.txt is damaged"):
        datasets.ptb()
    (tmp_path / "ptb" / "ptb.valid.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*ptb.valid.txt: No such file"):
        datasets.ptb()
    make_ptb(tmp_path, train=" a b\n", valid=" a z\n", test=" b\n")
    with pytest.raises(DataError, match=r"ptb.valid.txt has the word 'z'"):
        datasets.ptb()


def test_image_folder_reads_grey_palette_and_odd_sizes(tmp_path):
    make_folder(
        tmp_path, {"cat": [("RGB", (9, 4)), ("L", (5, 7))], "dog": [("P", (300, 3)), ("CMYK", (8, 8))]}
    )
    files, labels, classes = image_folder(tmp_path)
    assert classes == ["cat", "dog"]
    assert labels.tolist() == [0, 0, 1, 1]
    for path in files.paths:
        assert centre_crop(6)(path).shape == (3, 6, 6)
        for seed in range(20):
            view = random_resized_crop(6)(path, torch.Generator().manual_seed(seed))
            assert view.shape == (3, 6, 6)
            assert view.dtype == torch.uint8
    grey = centre_crop(6)(files.paths[1])
    assert torch.equal(grey[0], grey[1])
    chosen = files[torch.tensor([2, 0])]
    assert isinstance(chosen, Files)
    assert chosen.paths == (files.paths[2], files.paths[0])


def test_centre_crop_shows_the_middle(tmp_path):
    image = np.zeros((64, 128, 3), np.uint8)
    image[:, 48:80] = 200  # a bar in the middle
    Image.fromarray(image).save(tmp_path / "bar.png")
    view = centre_crop(56)(tmp_path / "bar.png")  # short side 64 stays as it is
    assert torch.equal(view[0, 0, 12:44], torch.full((32,), 200, dtype=torch.uint8))
    assert int(view[0, 0, 11]) == 0
    assert int(view[0, 0, 44]) == 0


def test_image_folder_refuses_what_is_not_there_and_what_cannot_be_decoded(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        image_folder(tmp_path / "nothing")
    with pytest.raises(DataError, match="one folder per class, got none"):
        image_folder(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="cat holds no images"):
        image_folder(tmp_path)
    make_folder(tmp_path, {"cat": [("RGB", (9, 4))]})
    files, _, _ = image_folder(tmp_path)
    files.paths[0].write_bytes(files.paths[0].read_bytes()[:30])
    with pytest.raises(DataError, match=r"cannot be decoded .*fetch it again"):
        centre_crop(6)(files.paths[0])


def test_data_dir_must_be_named_and_there(tmp_path, monkeypatch):
    monkeypatch.delenv("RTOPK_DATA", raising=False)
    with pytest.raises(DataError, match="add --data-dir FOLDER or set RTOPK_DATA"):
        data_dir()
    monkeypatch.setenv("RTOPK_DATA", str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="does not exist"):
        data_dir()
    monkeypatch.setenv("RTOPK_DATA", str(tmp_path))
    with pytest.raises(DataError, match="holds no cifar-10-batches-py or cifar-10-batches-bin"):
        find(*datasets.CIFAR_FOLDERS)


def test_data_check_says_what_is_found(tmp_path, rtopk):
    make_cifar(tmp_path, per_batch=4)
    make_ptb(tmp_path, train=" a b\n", valid=" a\n", test=" b\n")
    command = ["data", "check", "--data-dir", tmp_path, "--json"]
    result = rtopk(*command)
    assert result.returncode == 0, result.stderr
    sets = {entry["name"]: entry for entry in json.loads(result.stdout)["sets"]}
    assert {name: entry["state"] for name, entry in sets.items()} == {
        entry[0]: "ok" if entry[0] in ("CIFAR-10", "Penn Treebank") else "missing" for entry in tasks.SETS
    }
    assert "20 training and 4 test images" in sets["CIFAR-10"]["detail"]
    assert "held to its own MD5SUMS" in sets["CIFAR-10"]["detail"]  # not the original, and it says so
    (tmp_path / "ptb" / "ptb.test.txt").write_text("")
    result = rtopk(*command)
    assert result.returncode == 1
    assert "ptb.test.txt is damaged" in result.stdout


def test_a_folder_of_the_binary_version_that_lacks_a_file_is_told_so(tmp_path):
    make_cifar(tmp_path, per_batch=2, binary=True)
    (tmp_path / datasets.CIFAR_FOLDERS[1] / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"cannot read .*test_batch\.bin"):
        datasets.cifar10_from(tmp_path / datasets.CIFAR_FOLDERS[1])


def test_sums_must_name_every_file(tmp_path):
    make_ptb(tmp_path, train=" a b\n", valid=" a\n", test=" b\n")
    sums = tmp_path / "ptb" / "MD5SUMS"
    sums.write_text("\n".join(sums.read_text().splitlines()[:2]) + "\nhalf-a-line\n")
    with pytest.raises(DataError, match=r"does not name ptb\..*\.txt"):
        datasets.verified(tmp_path / "ptb", datasets.PTB)
    write_sums(tmp_path / "ptb")
    assert datasets.verified(tmp_path / "ptb", datasets.PTB)["ptb.train.txt"] == b" a b\n"


@pytest.mark.slow
@pytest.mark.skipif("RTOPK_DATA" not in os.environ, reason="needs the real data: RTOPK_DATA=folder")
def test_the_real_data():
    assert [entry.state for entry in tasks.inventory() if entry.name != "ImageNet"] == ["ok"] * 5
    train, test = datasets.cifar10()
    binary = b"".join(
        bytes([int(label)]) + image.numpy().tobytes() for image, label in zip(*test, strict=True)
    )
    assert hashlib.sha1(binary).hexdigest() == datasets.BINARY["test_batch.bin"]
    means = (train[0].double() / 255).mean((0, 2, 3))
    assert torch.allclose(means, torch.tensor([0.49140, 0.48216, 0.44653], dtype=torch.float64), atol=5e-5)
    text = datasets.ptb()
    assert [len(text.train), len(text.validation), len(text.test)] == [929_589, 73_760, 82_430]
    assert (text.words, len(text.lines)) == (10_000, 42_068)


def test_a_benchmark_reads_its_images_with_the_same_care(tmp_path):
    """It once unpickled them plainly: RTOPK_DATA=evil rtopk bench compress ran the file."""
    folder = tmp_path / datasets.CIFAR_FOLDERS[0]
    folder.mkdir()
    bomb = {b"data": Bomb(str(tmp_path / "bang")), b"labels": [1]}
    (folder / "data_batch_1").write_bytes(pickle.dumps(bomb, protocol=2))
    with pytest.raises(DataError, match="only arrays, lists and strings"):
        bench.real(1000, 1, tmp_path)
    assert not (tmp_path / "bang").exists()
    (tmp_path / "honest").mkdir()
    make_cifar(tmp_path / "honest", per_batch=4)
    assert bench.real(1000, 1, tmp_path / "honest").source.endswith("CIFAR-10")
