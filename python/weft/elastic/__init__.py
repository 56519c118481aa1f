"""`weft elastic`: a plan of phases, each with its active ranks, played by processes that join and leave."""
