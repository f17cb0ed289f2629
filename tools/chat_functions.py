"""Functions of the items of the task `tool_calls`, and the values of their parameters."""

from __future__ import annotations

from .chat_slots import choice, flag, nested, number, several, text, tool, whole

CITY = text(
    "Name of the city",
    "Paris",
    "Lima",
    "Oslo",
    "Kyoto",
    "Cairo",
    "Denver",
    "Lisbon",
    "Nairobi",
    "Perth",
)
OTHER_CITY = text(
    "Name of the city of arrival", "Rome", "Quito", "Bergen", "Osaka", "Tunis", "Boston", "Porto"
)
PERSON = text(
    "Name of the person", "Anna", "Bruno", "Chen", "Dalia", "Emil", "Fatima", "Goran", "Hana"
)
DAY = choice(
    "Day of the week", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"
)
ROOM = choice("Room of the house", "kitchen", "bedroom", "living_room", "bathroom", "garage")
LANGUAGE = choice("Target language", "french", "german", "spanish", "japanese", "swahili")
ITEM = text("Name of the product", "lamp", "backpack", "kettle", "notebook", "umbrella", "headset")
TICKER = text("Ticker symbol of the share", "ACME", "GLOB", "INIT", "UMBR", "WAYN")
TEAM = text("Name of the team", "Falcons", "Tigers", "Rovers", "Comets", "Herons")
SONG = text("Title of the song", "Blue Harbor", "Night Train", "Golden Field", "Paper Moon")
DISH = text("Name of the dish", "lentil soup", "apple pie", "fish curry", "pancakes")
PRIORITY = choice("Priority", "low", "normal", "high", "urgent")
MONEY = number("Amount of money", 12.5, 40.25, 99.9, 150.75, 260.5)
ADDRESS = nested(
    "Address of delivery",
    "{street} {house} in {city}",
    street=text("Street", "Elm Street", "Harbor Road", "Mill Lane"),
    house=whole("House number", 2, 40),
    city=CITY,
)
PERIOD = nested(
    "First and last day",
    "day {first} to day {last} of {month}",
    first=whole("First day of the month", 2, 10),
    last=whole("Last day of the month", 12, 28),
    month=choice("Month", "march", "june", "august", "october"),
)
SIZE = nested(
    "Size in centimetres",
    "{width} by {height} centimetres",
    width=whole("Width", 10, 60),
    height=whole("Height", 61, 120),
)
CONTACT = nested(
    "Who is responsible",
    "{name} of {team}",
    name=PERSON,
    team=TEAM,
)
RANGE = nested(
    "Range of prices",
    "between {least} and {most} dollars",
    least=whole("Lowest price", 5, 40),
    most=whole("Highest price", 60, 200),
)

TOOLS = (
    tool(
        "get_weather",
        "weather",
        "Get the current weather of a city.",
        "What is the weather in {city} in {unit}?",
        city=CITY,
        unit=choice("Unit of temperature", "celsius", "fahrenheit"),
    ),
    tool(
        "get_forecast",
        "weather",
        "Get the forecast of a city for the next days.",
        "Give me the forecast for {city} for the next {days} days.",
        city=CITY,
        days=whole("Number of days", 2, 14),
    ),
    tool(
        "get_air_quality",
        "weather",
        "Get the air quality of a city.",
        "How clean is the air in {city} now?",
        city=CITY,
    ),
    tool(
        "get_tide_table",
        "weather",
        "Get the times of high tide at a place on a day.",
        "When is high tide in {city} on {day}?",
        city=CITY,
        day=DAY,
    ),
    tool(
        "book_flight",
        "travel",
        "Book a flight.",
        "Book {seats} {cabin} seats on a flight from {origin} to {destination}.",
        origin=CITY,
        destination=OTHER_CITY,
        seats=whole("Number of seats", 2, 9),
        cabin=choice("Class of the seats", "economy", "business", "first", first="first class"),
    ),
    tool(
        "book_hotel",
        "travel",
        "Book a hotel room for several nights.",
        "Book a {kind} room in {city} for {nights} nights.",
        city=CITY,
        nights=whole("Number of nights", 2, 12),
        kind=choice("Kind of room", "single", "double", "suite"),
    ),
    tool(
        "rent_car",
        "travel",
        "Rent a car.",
        "Rent a {size} car in {city} for {days} days.",
        city=CITY,
        size=choice("Size of the car", "small", "medium", "large"),
        days=whole("Number of days", 2, 20),
    ),
    tool(
        "find_train",
        "travel",
        "Find trains between two cities on a day.",
        "Find a train from {origin} to {destination} on {day}.",
        origin=CITY,
        destination=OTHER_CITY,
        day=DAY,
    ),
    tool(
        "plan_trip",
        "travel",
        "Plan a trip to a city for a period.",
        "Plan a trip to {city} from {period}.",
        city=CITY,
        period=PERIOD,
    ),
    tool(
        "get_distance",
        "travel",
        "Get the distance of two cities by road.",
        "How far is it by road from {origin} to {destination} in {unit}?",
        origin=CITY,
        destination=OTHER_CITY,
        unit=choice("Unit of length", "kilometers", "miles"),
    ),
    tool(
        "send_message",
        "office",
        "Send a short message to a person.",
        "Send {person} the message '{body}'.",
        person=PERSON,
        body=text(
            "Text of the message",
            "I am late",
            "See you soon",
            "Call me back",
            "The report is ready",
        ),
    ),
    tool(
        "create_event",
        "office",
        "Create an event in the calendar.",
        "Put '{title}' in my calendar on {day} for {minutes} minutes.",
        title=text("Title of the event", "team lunch", "dentist", "budget review", "piano lesson"),
        day=DAY,
        minutes=whole("Length in minutes", 15, 90),
    ),
    tool(
        "create_task",
        "office",
        "Create a task with a priority.",
        "Create the {priority} priority task '{title}'.",
        title=text(
            "Title of the task", "write minutes", "order paper", "fix the door", "update slides"
        ),
        priority=PRIORITY,
    ),
    tool(
        "assign_ticket",
        "office",
        "Assign a ticket to the person responsible.",
        "Assign ticket {ticket} to {owner}.",
        ticket=whole("Number of the ticket", 2, 400),
        owner=CONTACT,
    ),
    tool(
        "set_reminder",
        "office",
        "Set a reminder after some hours.",
        "Remind me to {action} in {hours} hours.",
        action=text("What to do", "water the plants", "call the bank", "take a break", "buy milk"),
        hours=whole("Hours from now", 2, 20),
    ),
    tool(
        "book_room",
        "office",
        "Book a meeting room.",
        "Book a meeting room for {people} people on {day}.",
        people=whole("Number of people", 2, 20),
        day=DAY,
    ),
    tool(
        "translate_text",
        "language",
        "Translate a text.",
        "Translate '{body}' into {language}.",
        language=LANGUAGE,
        body=text(
            "Text to translate",
            "good morning",
            "where is the station",
            "thank you very much",
            "the bill please",
        ),
    ),
    tool(
        "define_word",
        "language",
        "Look up the meaning of a word.",
        "Look up the meaning of the word '{word}'.",
        word=text("Word to look up", "lattice", "brisk", "quorum", "tundra", "oblique"),
    ),
    tool(
        "count_words",
        "language",
        "Count the words of a file.",
        "Count the words of the file {path}.",
        path=text("Path of the file", "notes.txt", "draft.md", "letter.txt", "report.md"),
    ),
    tool(
        "check_spelling",
        "language",
        "Check the spelling of a file in a language.",
        "Check the spelling of {path}, which is in {language}.",
        language=LANGUAGE,
        path=text("Path of the file", "notes.txt", "draft.md", "letter.txt", "report.md"),
    ),
    tool(
        "set_light",
        "home",
        "Set the brightness of the light of a room.",
        "Set the {room} light to {percent} percent.",
        room=ROOM,
        percent=whole("Brightness in percent", 5, 95),
    ),
    tool(
        "set_heating",
        "home",
        "Set the temperature of a room.",
        "Heat the {room} to {degrees} degrees.",
        room=ROOM,
        degrees=number("Temperature in degrees Celsius", 17.5, 18.5, 20.5, 21.5, 22.5),
    ),
    tool(
        "switch_device",
        "home",
        "Switch a device on or off.",
        "Turn the {device} {is_on}.",
        device=text("Name of the device", "oven", "television", "fan", "coffee machine"),
        is_on=flag("True to switch it on", "on", "off"),
    ),
    tool(
        "lock_door",
        "home",
        "Lock or unlock a door.",
        "Please {is_locked} the {door} door.",
        door=choice("Door of the house", "front", "back", "garage", "cellar"),
        is_locked=flag("True to lock it", "lock", "unlock"),
    ),
    tool(
        "start_vacuum",
        "home",
        "Clean rooms with the robot.",
        "Vacuum the {rooms}.",
        rooms=several(
            "Rooms to clean",
            ["kitchen", "hall"],
            ["bedroom", "office"],
            ["hall", "attic", "cellar"],
        ),
    ),
    tool(
        "order_product",
        "shop",
        "Order a product to an address.",
        "Order {count} pieces of the {item} to {address}.",
        item=ITEM,
        count=whole("Number of pieces", 2, 15),
        address=ADDRESS,
    ),
    tool(
        "search_products",
        "shop",
        "Search products in a range of prices.",
        "Search for a {item} {prices}.",
        item=ITEM,
        prices=RANGE,
    ),
    tool(
        "track_parcel",
        "shop",
        "Track a parcel by its number.",
        "Where is my parcel {parcel}?",
        parcel=text("Number of the parcel", "PX1042", "QR7731", "ZB0090", "LK5518"),
    ),
    tool(
        "return_product",
        "shop",
        "Return a product.",
        "I want to return the {item} because it is {reason}.",
        item=ITEM,
        reason=choice("Reason of the return", "damaged", "too_small", "too_large", "late"),
    ),
    tool(
        "rate_product",
        "shop",
        "Rate a product with stars.",
        "Give the {item} {stars} stars.",
        item=ITEM,
        stars=whole("Number of stars", 2, 5),
    ),
    tool(
        "order_poster",
        "shop",
        "Order a poster in a size.",
        "Order a poster of {city} of {size}.",
        city=CITY,
        size=SIZE,
    ),
    tool(
        "transfer_money",
        "money",
        "Transfer money to a person.",
        "Transfer {amount} dollars to {person}.",
        person=PERSON,
        amount=MONEY,
    ),
    tool(
        "get_stock_price",
        "money",
        "Get the price of a share.",
        "What is the share price of {ticker}?",
        ticker=TICKER,
    ),
    tool(
        "buy_shares",
        "money",
        "Buy shares.",
        "Buy {count} shares of {ticker}.",
        ticker=TICKER,
        count=whole("Number of shares", 2, 50),
    ),
    tool(
        "convert_currency",
        "money",
        "Convert an amount of money.",
        "Convert {amount} {source} to {target}.",
        amount=MONEY,
        source=choice("Code of the source currency", "USD", "GBP", "CHF"),
        target=choice("Code of the target currency", "EUR", "JPY", "INR"),
    ),
    tool(
        "loan_payment",
        "money",
        "Compute the monthly payment of a loan.",
        "What is the monthly payment of a loan of {amount} dollars over {years} years at {rate} percent?",
        amount=number("Amount of the loan", 1000.5, 2500.5, 7200.5),
        years=whole("Years", 2, 20),
        rate=number("Interest rate in percent", 2.5, 3.75, 4.25),
    ),
    tool(
        "play_song",
        "leisure",
        "Play a song in a room.",
        "Play '{song}' in the {room}.",
        song=SONG,
        room=ROOM,
    ),
    tool(
        "get_score",
        "leisure",
        "Get the latest score of a team.",
        "How did the {team} play last time?",
        team=TEAM,
    ),
    tool(
        "buy_tickets",
        "leisure",
        "Buy tickets for a game.",
        "Buy {count} {kind} tickets for the {team} game.",
        team=TEAM,
        count=whole("Number of tickets", 2, 12),
        kind=choice("Kind of tickets", "standing", "seated", "vip", vip="VIP"),
    ),
    tool(
        "find_recipe",
        "leisure",
        "Find a recipe.",
        "Find a {diet} recipe for {dish} for {people} people.",
        dish=DISH,
        diet=choice("Diet", "vegan", "vegetarian", "gluten_free"),
        people=whole("Number of people", 2, 12),
    ),
    tool(
        "make_playlist",
        "leisure",
        "Make a playlist of songs.",
        "Make a playlist with {songs}.",
        songs=several(
            "Titles of the songs", ["Blue Harbor", "Paper Moon"], ["Night Train", "Golden Field"]
        ),
    ),
    tool(
        "start_workout",
        "leisure",
        "Start a workout.",
        "Start a {level} workout of {minutes} minutes.",
        level=choice("Difficulty", "easy", "medium", "hard"),
        minutes=whole("Length in minutes", 5, 60),
    ),
    tool(
        "register_player",
        "leisure",
        "Register a player with the club.",
        "Register {player}, aged {age}.",
        player=CONTACT,
        age=whole("Age in years", 6, 20),
    ),
    tool(
        "compute_area",
        "math",
        "Compute the area of a rectangle.",
        "What is the area of a rectangle of {size}?",
        size=SIZE,
    ),
    tool(
        "roll_dice",
        "math",
        "Roll dice.",
        "Roll {count} dice with {sides} sides.",
        count=whole("Number of dice", 2, 9),
        sides=whole("Number of sides", 4, 20),
    ),
)
