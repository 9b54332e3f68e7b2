"""Done messages again, into fenced sinks, with every fault: an exact account of each row."""
