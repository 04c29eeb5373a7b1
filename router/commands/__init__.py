"""One module per `pageray` sub-command; each has `add_parser(subparsers)`."""
