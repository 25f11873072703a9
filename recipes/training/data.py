"""Text that every machine has, the sources of Python's standard library, as a Megatron dataset of bytes."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.tokenizers import MegatronTokenizerBase

from recipes.models.architecture import BYTE_VOCAB_SIZE
from recipes.models.recipe import Recipe
from recipes.plan import devices

EOD = 256
_FORMAT = 1  # part of the cache's name: raise it when the way the corpus is written changes
# Installed packages differ from machine to machine, and the test data holds generated tables.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "config"}


class ByteTokenizer(MegatronTokenizerBase):
    """Token = byte value; 256 ends a document."""

    def __init__(self) -> None:
        super().__init__(path="bytes", config={})

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "ByteTokenizer", "vocab_size": BYTE_VOCAB_SIZE}

    @property
    def vocab_size(self) -> int:
        return BYTE_VOCAB_SIZE

    @property
    def vocab(self) -> dict[str, int]:
        return {chr(b): b for b in range(256)} | {"<eod>": EOD}

    @property
    def eod(self) -> int:
        return EOD

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def apply_chat_template(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError("a byte tokenizer has no chat template")


def _source_files() -> list[Path]:
    """The standard library's files in an order that depends on their names alone.

    Shuffled by a fixed seed, because the train and validation split cuts the list in two: in alphabetical
    order the validation set would be a few packages.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        (p for p in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(p.relative_to(root).parts[:-1])),
        key=lambda p: p.relative_to(root).as_posix(),
    )
    random.Random(0).shuffle(files)
    return files


def write_corpus(folder: Path) -> Path:
    """Writes the indexed dataset once (atomically) and returns its path prefix."""
    files = _source_files()
    names = hashlib.sha256(
        json.dumps([_FORMAT, [(p.name, p.stat().st_size) for p in files]]).encode()
    ).hexdigest()[:12]
    final = folder / f"stdlib-{names}"
    if final.is_dir():
        return final / "text"
    temporary = folder / f"stdlib-{names}.part"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    builder = IndexedDatasetBuilder(str(temporary / "text.bin"), dtype=np.uint16)
    for path in files:
        text = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        if text.size:
            document = np.append(text.astype(np.uint16), np.uint16(EOD))
            builder.add_document(torch.from_numpy(document.astype(np.int32)), [document.size])
    builder.finalize(str(temporary / "text.idx"))
    temporary.rename(final)
    return final / "text"


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one rank. A step's samples follow from its number, so resuming needs no state."""

    dataset: Any
    recipe: Recipe
    rank: int

    def micro_batch(self, index: int) -> dict[str, torch.Tensor]:
        """Forward pass `index` of this rank, [B,S]: tokens, labels, position_ids int64, loss_mask fp32.

        The tensors are on this rank's device.
        """
        size = self.recipe.micro_batch_size
        first = (index * self.recipe.num_ranks + self.rank) * size
        samples = [self.dataset[i] for i in range(first, first + size)]
        return {k: torch.stack([s[k] for s in samples]).to(devices.own()) for k in samples[0]}


def build_batches(recipe: Recipe, folder: Path) -> tuple[Batches, Batches]:
    """Train and validation batches; collective (rank 0 writes the files that the others read)."""
    rank = dist.get_rank()
    if rank == 0:
        write_corpus(folder)
    dist.barrier()
    prefix = write_corpus(folder)
    per_pass = recipe.num_ranks * recipe.micro_batch_size
    num_train = recipe.num_steps * recipe.num_microbatches * per_pass
    config = GPTDatasetConfig(
        random_seed=recipe.seed,
        sequence_length=recipe.sequence_length,
        blend=([str(prefix)], None),
        split=f"{1 - recipe.val_fraction},{recipe.val_fraction},0",
        path_to_cache=str(prefix.parent / "index"),
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # the attention kernel masks what is ahead of a token by itself
    )
    train, valid, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, [num_train, recipe.val_batches * per_pass, 0], lambda: True, config
    ).build()
    return Batches(train, recipe, rank), Batches(valid, recipe, rank)
