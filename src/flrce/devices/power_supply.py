"""What this device's own battery holds."""

from flrce_client.power_supply import POWER_SUPPLY_FOLDER, get_battery_metric, read_battery_level

__all__ = ["POWER_SUPPLY_FOLDER", "get_battery_metric", "read_battery_level"]
