# pyright: basic
# Run by an interpreter whose libraries are not typed, or not here.
"""vLLM at the other end of a pipe, run by an interpreter that has it. Imports nothing of ours.

Lines of JSON: `{"model", "dtype", "max_model_len"}` first, answered by `{"ready_s"}`; then
`{"prompts": [[ids]], "output_len"}`, each answered by `{"seconds", "num_tokens"}`.
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints is no answer
    started_s = time.perf_counter()
    settings = json.loads(sys.stdin.readline())

    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    _say(answers, {"ready_s": time.perf_counter() - started_s})
    for line in sys.stdin:
        load = json.loads(line)
        sampling = SamplingParams(temperature=0.0, max_tokens=load["output_len"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in load["prompts"]]
        begun_s = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun_s
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        _say(answers, {"seconds": seconds, "num_tokens": num_tokens})


def _say(answers, message) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
