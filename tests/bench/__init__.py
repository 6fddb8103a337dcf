"""`make bench`: the product and a bare alternative, interleaved in one run; ratios are what counts."""
