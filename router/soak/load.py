"""Clients that ask again and again, and compare every answer with the one of a calm run."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import httpx
import msgspec

REQUEST_TIMEOUT_S = 300.0
_OK, _UNAVAILABLE = 200, 503
_DONE = "data: [DONE]"
_DATA = "data: "


@dataclass(frozen=True)
class Question:
    prompt: str
    max_tokens: int


@dataclass
class Tally:
    """What came of the requests so far."""

    num_right: int = 0
    num_refused: int = 0
    """503, or an error object inside a stream: allowed when no engine can serve."""
    wrong: list[str] = field(default_factory=list[str])
    """Answers that differ, streams that just stop, other errors."""
    errors: Counter[str] = field(default_factory=Counter[str])


class RefusedError(Exception):
    """The server said clearly that it cannot serve now."""


def make_questions(rng: random.Random, count: int) -> list[Question]:
    """Prompts of very different lengths, many with a long beginning in common."""
    words = ("river", "stone", "paper", "light", "engine", "garden", "winter", "signal", "bridge")
    beginnings = [" ".join(rng.choice(words) for _ in range(90)) for _ in range(3)]
    questions: list[Question] = []
    for number in range(count):
        tail = " ".join(rng.choice(words) for _ in range(rng.randrange(3, 40)))
        start = rng.choice([*beginnings, ""])
        questions.append(Question(f"{start} {number} {tail}".strip(), rng.randrange(8, 48)))
    return questions


class Client:
    """Streams completions of one model, greedily."""

    def __init__(self, base_url: str, model: str) -> None:
        self._http = httpx.AsyncClient(base_url=base_url, timeout=REQUEST_TIMEOUT_S)
        self._model = model

    async def ask(self, question: Question) -> str:
        """The whole text. Raises `RefusedError`, or ValueError for anything that is not allowed."""
        body = {
            "model": self._model,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == _UNAVAILABLE:
                raise RefusedError((await response.aread()).decode()[:300])
            if response.status_code != _OK:
                text = (await response.aread()).decode()[:300]
                raise ValueError(f"HTTP {response.status_code}: {text}")
            return await _text_of(response)

    async def close(self) -> None:
        await self._http.aclose()


async def _text_of(response: httpx.Response) -> str:
    text = ""
    async for line in response.aiter_lines():
        if line == _DONE:
            return text
        if line.startswith(_DATA):
            chunk = msgspec.json.decode(line.removeprefix(_DATA), type=_Chunk)
            if chunk.error is not None:
                raise RefusedError(chunk.error.message)
            text += "".join(choice.text for choice in chunk.choices)
    raise ValueError(f"the stream stopped after {len(text)} characters, without a word")


class _Choice(msgspec.Struct):
    text: str = ""


class _Error(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


class Load:
    """`num_clients` clients at once, each one question after the other until `stop`."""

    def __init__(self, client: Client, answers: dict[Question, str], num_clients: int) -> None:
        self._client = client
        self._answers = answers
        self._is_over = False
        self.tally = Tally()
        self._tasks = [
            asyncio.create_task(self._run(random.Random(number))) for number in range(num_clients)
        ]

    async def stop(self) -> None:
        """Let the questions under way be answered, and ask no more."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _run(self, rng: random.Random) -> None:
        questions = list(self._answers)
        while not self._is_over:
            await self._ask(rng.choice(questions))

    async def _ask(self, question: Question) -> None:
        try:
            answer = await self._client.ask(question)
        except RefusedError as error:
            self.tally.num_refused += 1
            self.tally.errors[str(error)[:120]] += 1
            await asyncio.sleep(1.0)
        except (ValueError, httpx.HTTPError) as error:
            self.tally.wrong.append(f"{type(error).__name__}: {error}")
        else:
            expected = self._answers[question]
            if answer == expected:
                self.tally.num_right += 1
            else:
                self.tally.wrong.append(f"{answer!r} instead of {expected!r}")
