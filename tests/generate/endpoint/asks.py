"""The task of tests/asking.py as a program, which asks for completions with what Python has."""

import json
import os
import random
import sys
import urllib.request

URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]


def complete(prompt: str) -> str:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "prompt": prompt}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/completions", body, headers)) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def main() -> None:
    row = json.loads(sys.stdin.readline())
    generator = random.Random(row["id"])
    hidden = [str(generator.randint(0, 9)) for _ in range(2)]
    text, asked = row["prompt"], 0
    for number in range(2):
        turn = complete(text)
        words = turn.replace("=", "").split()
        asked += words == [str(number + 1)]
        text += f"{turn} " + (hidden[int(words[0]) - 1] + " =" if words in (["1"], ["2"]) else "sort =")
    last = complete(text).replace("=", "").split()
    print(json.dumps({"reward": {"asked": 0.25 * asked, "right": float(last == sorted(hidden))}}))


if __name__ == "__main__":
    main()
