"""Programming tasks for a target to answer, so that its drafter learns code: of our own writing, put together from what is asked
(a function, a program, a query, an explanation, a correction, a change), about what, in which language and in which words. Tens
of thousands of them differ, and each is a function of the random numbers alone."""

from __future__ import annotations

import random
from collections.abc import Callable

from .snippets import FAULTY, SOUND, Snippet
from .subjects import (
    ANALYSES,
    CHANGES,
    CONCEPTS,
    FIELDS,
    FUNCTIONS,
    LANGUAGES,
    NOUNS,
    PAIRS,
    PROGRAMS,
    QUERIES,
    SET_UP,
    SHELL,
    STRUCTURES,
    TABLES,
)

EXTRAS = (
    *("",) * 8,
    *(" Add comments.", " Add a docstring.", " Show an example of how to use it.", " Explain how it works.", " Keep it short."),
    *(" Include error handling.", " Don't use any libraries.", " Write tests for it, too.", " Explain each step.", " Code only."),
    *(" It should handle empty input.", " Use type hints where the language has them.", " Give its time complexity.", " thanks!"),
)
"""What is asked beside the task, mostly nothing."""


def function(rng: random.Random) -> str:
    what, language = rng.choice(FUNCTIONS), rng.choice(LANGUAGES)
    stem = what.split(" ", 1)
    asked = (
        f"Write a {language} function that {what}.",
        f"Write a function in {language} that {what}.",
        f"Can you write a {language} function which {what}?",
        f"I need a {language} function that {what}.",
        f"How do I write a function that {what} in {language}?",
        f"{language}: a function that {what}",
        f"Please give me {language} code that {what}.",
        f"Implement, in {language}, a function that {what}, and call it on two examples.",
        f"Show me two ways to write a {language} function that {what}.",
        f"Write a recursive {language} function that {what}, if that is possible.",
        f"Create a {language} script that {stem[0]} {stem[1] if stem[1:] else ''} and prints the result.",
    )
    return rng.choice(asked) + rng.choice(EXTRAS)


def program(rng: random.Random) -> str:
    what, language = rng.choice(PROGRAMS), rng.choice(LANGUAGES)
    asked = (
        f"Write {what} in {language}.",
        f"Create {what} in {language}.",
        f"Write a {language} program for {what}.",
        f"Help me build {what} with {language}.",
        f"I want to make {what} in {language}. Where do I start?",
        f"Write the classes for {what} in {language}.",
        f"Design {what} and write it in {language}.",
        f"Write a simple version of {what} in {language}, at most 40 lines.",
    )
    return rng.choice(asked) + rng.choice(EXTRAS)


def structure(rng: random.Random) -> str:
    what, language = rng.choice(STRUCTURES), rng.choice(LANGUAGES)
    asked = (
        f"Implement {what} in {language}.",
        f"Write a {language} class for {what}.",
        f"Write {what} in {language} with methods to add, remove and print.",
        f"Create a class that represents {what} in {language}.",
        f"Show how to implement {what} from scratch in {language}.",
        f"Write a {language} class for {what} with a constructor, a getter and a way to print it.",
    )
    return rng.choice(asked) + rng.choice(EXTRAS)


def explanation(rng: random.Random) -> str:
    concept, language, (one, other) = rng.choice(CONCEPTS), rng.choice(LANGUAGES), rng.choice(PAIRS)
    return rng.choice(
        (
            f"Explain {concept} in {language} with an example.",
            f"What is meant by {concept}? Show some {language} code.",
            f"How does {language} do {concept}?",
            f"Give me an example of {concept} in {language}.",
            f"I don't understand {concept}. Can you explain it with simple {language} code?",
            f"What are common mistakes with {concept} in {language}?",
            f"Write a short tutorial about {concept} in {language}.",
            f"When should I use {concept} in {language}?",
            f"What is the difference between {one} and {other}? Give an example in code.",
            f"Explain the difference between {one} and {other} to a beginner.",
        )
    )


def query(rng: random.Random) -> str:
    table, group, number = rng.choice(TABLES)
    words = {"table": table, "group": group, "number": number}
    what, change = rng.choice(QUERIES).format(**words), rng.choice(CHANGES).format(**words)
    return rng.choice(
        (
            f"Write a SQL query that finds {what} in the table {table}.",
            f"I have a table {table} with columns id, name, {group} and {number}. Write a query for {what}.",
            f"SQL: from {table}({group}, {number}), select {what}.",
            f"How do I get {what} from {table} in SQL?",
            f"Given {table} (id, name, {group}, {number}, created_at), write SQL to list {what}, and explain it.",
            f"Write a PostgreSQL query that returns {what} from {table}.",
            f"Write a SQL statement that {change}.",
            f"Which SQL statement {change}?",
        )
    )


def shell(rng: random.Random) -> str:
    what = rng.choice(SHELL)
    return rng.choice(
        (
            f"Write a bash script to {what}.",
            f"How do I {what} on the command line?",
            f"Which Linux command can I use to {what}?",
            f"Give me a one-liner to {what}.",
            f"Write a shell script that can {what}, and explain every line.",
            f"How can I {what} with Python instead of bash?",
            f"What is the PowerShell way to {what}?",
        )
    )


def analysis(rng: random.Random) -> str:
    what = rng.choice(ANALYSES)
    asked = (
        f"Write Python code to {what}.",
        f"How do I {what} in Python?",
        f"Show me how to {what}.",
        f"In R, how can I {what}?",
        f"Write a short Python script to {what}, with comments.",
    )
    return rng.choice(asked) + rng.choice(EXTRAS)


def set_up(rng: random.Random) -> str:
    return rng.choice(SET_UP) + rng.choice((".", ".", ", please.", " and explain it.", " with comments.", ". Keep it minimal."))


def question(rng: random.Random) -> str:
    """About code that is as it should be."""
    language, code = filled(rng, rng.choice(SOUND))
    other = rng.choice(LANGUAGES)
    asked = (
        *("What does this code do?", "Explain this code line by line.", "Explain this to a beginner.", "Review this code."),
        *("What is the time complexity of this code?", "What does this print or return?", "What could go wrong here?"),
        *(
            "Add comments to this code.",
            "Add error handling to this code.",
            "Write unit tests for this code.",
            "Make this shorter.",
        ),
        *("Refactor this code.", "Make this code faster.", "Add type annotations.", "Use better names in this code."),
        *(f"Translate this to {other}.", f"Rewrite this in {other}.", f"How would this look in {other}?", "Write it as a class."),
        *(
            "Add a docstring, and give back the whole code.",
            "Return the same code with a check of the input.",
            "Rename total to sum.",
        ),
        *("Change it so that it also handles an empty input. Give me all of the code.", "Add a function that does the opposite."),
    )
    return placed(rng, rng.choice(asked), language, code)


def correction(rng: random.Random) -> str:
    """About code that is not."""
    language, code = filled(rng, rng.choice(FAULTY))
    asked = (
        *(
            "Find the bug in this code.",
            "Fix this code.",
            "This does not work. Why?",
            "What is wrong here?",
            "Why do I get an error?",
        ),
        *(
            "Correct the mistake and explain it.",
            "Debug this for me.",
            "Give me the corrected code.",
            "Can you spot the problem?",
        ),
        *("My teacher says there is a mistake in this. Where?", "This gives the wrong result. Repair it.", "help, this crashes"),
    )
    return placed(rng, rng.choice(asked), language, code)


def completion(rng: random.Random) -> str:
    """The beginning of some code, to be gone on with."""
    language, code = filled(rng, rng.choice(SOUND))
    lines = code.split("\n")
    begun = "\n".join(lines[: rng.randint(1, max(1, len(lines) // 2))]).rstrip()
    asked = rng.choice(
        ("Complete this code:", "Finish this function.", "Continue the code below.", "What comes next?", "Write the rest:")
    )
    return f"{asked}\n\n```{language}\n{begun}\n```" if rng.random() < 0.7 else f"{asked}\n\n```{language}\n{begun}"


KINDS: tuple[tuple[Callable[[random.Random], str], int], ...] = (
    *((function, 24), (program, 10), (structure, 8), (explanation, 9), (query, 10), (shell, 6), (analysis, 5), (set_up, 5)),
    *((question, 13), (correction, 6), (completion, 4)),
)
"""Kinds of tasks, and how often each is asked for."""
_MAKERS, _WEIGHTS = zip(*KINDS, strict=True)


def task(rng: random.Random) -> str:
    """The text of one task."""
    made: str = rng.choices(_MAKERS, _WEIGHTS)[0](rng)
    return made


def filled(rng: random.Random, snippet: Snippet) -> Snippet:
    """The snippet with words in place of NOUN and FIELD, in capitals where that is a type's name."""
    language, code = snippet
    noun, field = rng.choice(NOUNS), rng.choice(FIELDS)
    for gap, word in (("NOUN", noun), ("Noun", noun.capitalize()), ("FIELD", field)):
        code = code.replace(gap, word)
    return language, code


def placed(rng: random.Random, asked: str, language: str, code: str) -> str:
    """Words and code, mostly in this order and mostly fenced."""
    block = f"```{language}\n{code}\n```" if rng.random() < 0.85 else code
    return f"{block}\n\n{asked}" if rng.random() < 0.2 else f"{asked}\n\n{block}"
