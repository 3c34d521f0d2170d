"""`python -m narrowcast` is `narrowcast`."""

from narrowcast.cli import main

main()
