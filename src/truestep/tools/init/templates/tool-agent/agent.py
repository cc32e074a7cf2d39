"""The environment of this task: boxes that a tool opens, and a question about what is in one of them."""

from truestep import Answer, Environment, tool


class Boxes(Environment):
    """The reward adds up three parts: for a call of the tool, for a number as the last turn, and for the right one."""

    def start(self, row):
        self.opened = False
        return row["prompt"]

    @tool
    def open(self, box: int) -> str:
        """Return the number that is in a box."""
        self.opened = True
        boxes = self.row["boxes"]
        return str(boxes[box]) if 0 <= box < len(boxes) else "nothing"

    def finish(self, answer: Answer) -> dict[str, float]:
        text = answer.text.strip()
        right = self.opened and text == str(self.row["answer"])
        return {"called": 0.2 * self.opened, "answered": 0.2 * (self.opened and text.isdigit()), "right": 0.6 * right}

    def cut(self, reason: str) -> dict[str, float]:
        return {"called": 0.2 * self.opened, "answered": 0.0, "right": 0.0}
