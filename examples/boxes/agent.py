"""The same task as a program with OpenAI's package: README.md."""

import json
import sys

from openai import OpenAI

row = json.loads(sys.stdin.readline())
parameters = {"type": "object", "properties": {"box": {"type": "integer"}}, "required": ["box"]}
tools = [
    {
        "type": "function",
        "function": {"name": "open", "description": "Return what is in a box.", "parameters": parameters},
    }
]
client, messages = OpenAI(), list(row["prompt"])
for _ in range(3):
    answer = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
    messages.append(answer)
    if not answer.tool_calls:
        break
    for call in answer.tool_calls:
        box = json.loads(call.function.arguments)["box"]
        content = str(row["boxes"][box]) if 0 <= box < len(row["boxes"]) else "nothing"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
print(json.dumps({"reward": float(answer.content == row["answer"])}))
