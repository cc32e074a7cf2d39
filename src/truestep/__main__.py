from truestep.commands.cli import main

main(prog_name="truestep")
