"""Who trains?"""
