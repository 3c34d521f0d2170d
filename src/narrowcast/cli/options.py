"""The arguments and options that several verbs share."""

import click

recipe_argument = click.argument("recipe")
overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
run_argument = click.argument("folder", metavar="DIR", type=click.Path())
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
