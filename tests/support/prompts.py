"""32 prompts that differ in what tends to break: length, script, turns, block boundaries."""

from collections.abc import Callable

Conversation = list[dict[str, str]]

_SYSTEM = {"role": "system", "content": "You are a careful assistant who answers in one sentence."}


def _user(text: str) -> Conversation:
    return [{"role": "user", "content": text}]


def _turns(*texts: str) -> Conversation:
    roles = ("user", "assistant")
    return [_SYSTEM] + [
        {"role": roles[position % 2], "content": text} for position, text in enumerate(texts)
    ]


def _story(num_sentences: int) -> str:
    people = ("Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald")
    things = ("a red lamp", "an old map", "two keys", "the wrong book", "a letter", "seven coins")
    return " ".join(
        f"On day {day}, {people[day % 6]} gave {people[(day * 5 + 1) % 6]} {things[(day * 7) % 6]}."
        for day in range(1, num_sentences + 1)
    )


CONVERSATIONS: list[Conversation] = [
    _user("What is the capital of France?"),
    _user("Hi"),
    _user("Name three fruits that are red."),
    _user("Write a haiku about the sea."),
    _user("2 + 2 ="),
    _user("Translate 'good morning' into Spanish."),
    _user("Was ist die Hauptstadt von Österreich? Bitte auf Deutsch."),
    _user("日本の首都はどこですか？"),
    _user("Какая столица России?"),
    _user("ما هي عاصمة مصر؟"),
    _user("🙂🙃🚀 What do these emoji mean? 👩‍👩‍👧‍👦"),
    _user("Explain: e̸͓̚m̷̝͝p̶͕̽t̷̮͆y̶͕͑ text with combining marks"),
    _user("def fibonacci(n):\n    '''Return the n-th Fibonacci number.'''\n"),
    _user('{"name": "Ada", "born": 1815, "fields": ["mathematics"]} Summarise this JSON.'),
    _user("   leading and trailing spaces   "),
    _user("\n\n\nnewlines\n\n\n"),
    _turns("Who wrote Hamlet?", "William Shakespeare.", "When was he born?"),
    _turns("Remember the number 42.", "I will.", "Which number did I say?"),
    _turns("Hello!", "Hello, how can I help?", "Tell me a joke.", "Why did the hen cross?", "Why?"),
    _turns("Count to three.", "1, 2, 3.", "Now count down.", "3, 2, 1.", "Again, upwards."),
    _user("List the planets of the solar system in order from the sun."),
    _user("Why is the sky blue? Answer like a physicist."),
    _user("A train leaves at 9:15 and arrives at 11:40. How long is the journey?"),
    _user("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"),
    _user("the the the the the the the the the the the the the the the the the the the"),
    _user(_story(3) + " Who had the map?"),
    _user(_story(7) + " Who had the keys?"),
    _user(_story(12) + " Who had the lamp?"),
    _user(_story(20) + " What happened on day 5?"),
    _user(_story(33) + " What happened on the last day?"),
    _turns(_story(10), "I have read it.", _story(9), "That too.", "Which person gave most?"),
    _user(_story(16) + " Summarise."),
]


def encoded(encode_chat: Callable[[Conversation], list[int]]) -> list[list[int]]:
    """Token ids of the 32 prompts; the last ones are cut to meet block boundaries exactly."""
    ids = [encode_chat(conversation) for conversation in CONVERSATIONS]
    assert len(ids) == 32
    for position, length in ((20, 32), (21, 33), (22, 31), (24, 48)):
        ids[position] = ids[position][:length]
    return ids
