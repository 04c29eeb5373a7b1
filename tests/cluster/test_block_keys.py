import hashlib
import os
import struct
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from pageray.cluster.block_keys import BlockContent, BlockHasher, root_key

PRINT_KEYS = """
from pageray.cluster.block_keys import BlockHasher, root_key
chain = []
BlockHasher(root_key("model", "bfloat16", 4), 4).extend(chain, range(40), "salt")
print("".join(content.key.hex() for content in chain))
"""


def chain_of(tokens: list[int], salt: str = "") -> list[BlockContent]:
    chain: list[BlockContent] = []
    BlockHasher(root_key("model", "bfloat16", 4), 4).extend(chain, tokens, salt)
    return chain


def test_processes_with_different_hash_seeds_agree_on_every_key() -> None:
    keys = {
        subprocess.run(
            [sys.executable, "-P", "-c", PRINT_KEYS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(keys) == 1
    assert len(keys.pop().strip()) == 10 * 64


def test_key_is_the_digest_of_the_documented_bytes() -> None:
    root = hashlib.sha256(
        b"pageray-root"
        + struct.pack("<I", 5)
        + b"model"
        + struct.pack("<I", 8)
        + b"bfloat16"
        + struct.pack("<II", 4, 1)
    ).digest()
    assert root_key("model", "bfloat16", 4) == root
    first = hashlib.sha256(
        root + struct.pack("<I", 4) + b"salt" + struct.pack("<4I", 1, 2, 3, 4)
    ).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()
    assert [content.key for content in chain_of([1, 2, 3, 4, 5, 6, 7, 8, 9], "salt")] == [
        first,
        second,
    ]


def test_everything_that_changes_kv_changes_the_key() -> None:
    roots = {
        root_key("model", "bfloat16", 4),
        root_key("other", "bfloat16", 4),
        root_key("model", "float16", 4),
        root_key("model", "bfloat16", 8),
        root_key("modelb", "float16", 4),
    }
    assert len(roots) == 5
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    keys = {chain_of(tokens, salt)[1].key for salt in ("", "a", "b")}
    keys.add(chain_of([0, *tokens[1:]])[1].key)
    assert len(keys) == 4


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=30), cut=st.integers(0, 30))
def test_growing_a_chain_equals_building_it_at_once(tokens: list[int], cut: int) -> None:
    hasher = BlockHasher(root_key("model", "bfloat16", 4), 4)
    grown: list[BlockContent] = []
    hasher.extend(grown, tokens[:cut], "s")
    hasher.extend(grown, tokens, "s")
    assert grown == chain_of(tokens, "s")
    assert len(grown) == len(tokens) // 4
