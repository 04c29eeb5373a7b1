"""Our own engine at the other end of a pipe, so that it is measured as its peers are."""

import json
import os
import sys
import time
from typing import TextIO


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started_s = time.perf_counter()
    settings = json.loads(sys.stdin.readline())

    from pageray.cluster.config import EngineConfig
    from pageray.cluster.generation import GenerateRequest
    from pageray.cluster.ids import RequestId
    from pageray.cluster.sampling_params import SamplingParams
    from pageray.workers.engine import Engine

    engine = Engine.start(EngineConfig.from_mapping({"device": "cpu", **settings}))
    _say(answers, {"ready_s": time.perf_counter() - started_s})
    for line in sys.stdin:
        load = json.loads(line)
        sampling = SamplingParams(temperature=0.0, max_tokens=load["output_len"], ignore_eos=True)
        begun_s = time.perf_counter()
        for number, ids in enumerate(load["prompts"]):
            engine.add(
                GenerateRequest(
                    request_id=RequestId(str(number)),
                    prompt_token_ids=tuple(ids),
                    sampling=sampling,
                )
            )
        num_tokens = 0
        while engine.has_requests:
            for output in engine.step():
                num_tokens += sum(len(sequence.token_ids) for sequence in output.sequences)
        seconds = time.perf_counter() - begun_s
        _say(answers, {"seconds": seconds, "num_tokens": num_tokens})
    engine.shutdown()


def _say(answers: TextIO, message: dict[str, float]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
