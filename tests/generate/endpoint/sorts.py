"""A program that the tests of `environment: {type: command}` run: it asks for completions with what Python has."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
STOP = [] if sys.argv[1] == "without stops" else ["="]


def post(path: str, body: Any) -> Any:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def complete(prompt: str, **options: Any) -> str:
    body = {"model": "policy", "prompt": prompt, "stop": STOP, **options}
    return str(post("/completions", body)["choices"][0]["text"])


def main(how: str, asked: str) -> None:
    row = json.loads(sys.stdin.readline())
    assert row["prompt"] == asked, "the record, and a field of it in an argument"
    text = row["prompt"]
    first = complete(text)
    text += first
    if how == "fails" and len(first) % 3 == 0:
        print("about to fail")
        sys.exit(3)
    if how == "hangs":
        post(f"/documents/{KEY}/reward", {"reward": 0.5})
        time.sleep(600)
    second = complete(text + " sort 3 1 =", temperature=0.3)
    words = (first + second).split()
    reward = {"digits": sum(word.isdigit() for word in words), "length": -0.1 * len(words)}
    if how == "goes on":
        post(f"/documents/{KEY}/reward", {"reward": 2.0, "turn_rewards": [1.0, None]})
        for _ in range(20):
            complete(text)
        raise AssertionError("a limit should have ended this")
    if how == "branches":
        complete(text + " sort 1 =")
        complete("sort 2 =")
        post(f"/documents/{KEY}/reward", {"reward": 1.0, "turn_rewards": [0.1, 0.2, 0.3, 0.4]})
    if how == "is wrong":
        reward = {"right": 0.0, "short": 0.0}
    if how == "says nothing":
        return
    print(json.dumps({"reward": reward}))


if __name__ == "__main__":
    main(*sys.argv[1:])
