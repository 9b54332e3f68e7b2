"""What a log says of its groups, for all that show it: command, page and admin. Nothing here reads Kafka."""
