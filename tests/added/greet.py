"""A subcommand."""

HELP = "greet somebody"
PAGE = "reference/cli.md"


def add_arguments(parser):
    parser.add_argument("name", help="of whom to greet")
    parser.add_argument("--loud", action="store_true", help="in capitals")


def run(arguments):
    print("HELLO" if arguments.loud else "Hello", arguments.name)
    return 3
