from truestep.cli import main

main(prog_name="truestep")
