# pyright: basic
# Run by an interpreter whose libraries are not typed, or not here.
"""transformers' `generate` at the other end of a pipe; the protocol is `vllm_peer`'s.

Requests are padded to one batch, as its users do it.
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started_s = time.perf_counter()
    settings = json.loads(sys.stdin.readline())

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=getattr(torch, settings["dtype"])
    )
    model.eval()
    _say(answers, {"ready_s": time.perf_counter() - started_s})
    for line in sys.stdin:
        load = json.loads(line)
        # All prompts of a load are equally long.
        ids = torch.tensor(load["prompts"])
        begun_s = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=load["output_len"],
                max_new_tokens=load["output_len"],
            )
        seconds = time.perf_counter() - begun_s
        num_tokens = (output.shape[1] - ids.shape[1]) * ids.shape[0]
        _say(answers, {"seconds": seconds, "num_tokens": num_tokens})


def _say(answers, message) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
