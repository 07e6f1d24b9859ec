"""What we ask of the compiler: regions compiled apart, each with its own options."""

from stepgraph.inductor.regional import Region, region_of, tag

__all__ = ["Region", "region_of", "tag"]
