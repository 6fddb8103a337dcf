"""`python -m rezuscloud` and the `rezuscloud` script: hands over to the commands."""

from rezuscloud.commands.grammar import main

if __name__ == "__main__":
    main()
