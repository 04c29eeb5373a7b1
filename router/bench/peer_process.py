"""A process that serves loads over a pipe; see `peers/vllm_peer.py` for the protocol."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from pageray.cluster.errors import ConfigError

PEERS = Path(__file__).parent / "peers"


class PeerProcess:
    """Started and ready after construction."""

    def __init__(
        self,
        python: str,
        script: Path,
        settings: Mapping[str, object],
        environment: Mapping[str, str],
    ) -> None:
        """`python`: the interpreter that has the peer installed. Raises `ConfigError` with the
        last of what it printed when it does not come up."""
        self._process = subprocess.Popen(
            [python, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._name = script.stem
        self.ready_s = self._ask(settings)["ready_s"]
        """From the start of the script to an engine that can run."""

    def run(self, prompts: list[list[int]], output_len: int) -> float:
        """Output tokens per second over one load. Raises `ConfigError` when the peer failed."""
        answer = self._ask({"prompts": prompts, "output_len": output_len})
        expected = len(prompts) * output_len
        if answer["num_tokens"] != expected:
            raise ConfigError(
                f"{self._name} gave {answer['num_tokens']:.0f} tokens, {expected} were asked for."
            )
        return answer["num_tokens"] / answer["seconds"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, message: Mapping[str, object]) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            raise ConfigError(
                f"{self._name} ended with status {status}; what it printed above says why. The "
                "interpreter must be one that has the peer installed."
            )
        return cast("dict[str, float]", json.loads(line))
