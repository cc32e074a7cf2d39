"""The processes of a run: who they are, what they tell each other, and how one that is missing is noticed."""
