"""What do replies become?"""
