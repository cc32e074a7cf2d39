"""The program `truestep`."""

from truestep.process.bytecode import keep_bytecode


def main() -> None:
    keep_bytecode()  # before the command line is imported
    from truestep.commands.cli import main as run

    run(prog_name="truestep")


if __name__ == "__main__":
    main()
