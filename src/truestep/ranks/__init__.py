"""The processes of a run: their places and groups, what they send each other, and a watch over them."""
