"""One recipe for each thing that users add from outside `src`, as docs/architecture.md gives them."""
