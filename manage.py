#!/usr/bin/env python3
"""Django's command line, and SpecPilot's: `up` starts everything, `worker` joins another machine."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.config.settings")
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import execute_from_command_line

    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        print(f"Configuration: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
