"""What the core knows: the run, its work, its fleet, its versions, its transfers and its timers.

Records and the bookkeeping that keeps them consistent; what to do about them is in `actions`.
"""
