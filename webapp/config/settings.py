"""Django settings. Everything that a deployment may change comes from the environment:

SPECPILOT_DATA           data folder (default: .specpilot in the repository)
DATABASE_URL             postgres://user:password@host/name; default: SQLite in the data folder
REDIS_URL                redis://host:6379/0; default: the embedded broker on a unix socket in the data folder
SPECPILOT_ALLOWED_HOSTS  further host names, with commas, under which the web is reached
SPECPILOT_HTTPS          1 where a proxy terminates TLS: secure cookies, HSTS, X-Forwarded-Proto is believed
SPECPILOT_SECRET_KEY     the secret key, where several machines serve the web; default: made once in the data folder
SPECPILOT_DEBUG          1 for Django's debug mode; never on a machine that others reach
SPECPILOT_LEASE_SECONDS  how long a worker may be silent before its job is given to another
"""

from __future__ import annotations

import hashlib
import os
import socket

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

from engine.paths import REPOSITORY, data_dir
from webapp.config.broker_url import celery_url, database_number, redis_url
from webapp.config.secret import secret_key


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}


BASE_DIR = REPOSITORY
DATA_DIR = data_dir()
DEBUG = _flag("SPECPILOT_DEBUG")
HTTPS = _flag("SPECPILOT_HTTPS")
SECRET_KEY = os.environ.get("SPECPILOT_SECRET_KEY") or secret_key(DATA_DIR)
ALLOWED_HOSTS = [
    "localhost",
    "127.0.0.1",
    "[::1]",
    socket.gethostname().lower(),
    *filter(None, os.environ.get("SPECPILOT_ALLOWED_HOSTS", "").split(",")),
]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "servestatic.runserver_nostatic",
    "django.contrib.staticfiles",
    "channels",
    "csp",
    "rest_framework",
    "django_filters",
    "drf_spectacular",
    "webapp.accounts",
    "webapp.searches",
    "webapp.supervisor",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "servestatic.middleware.ServeStaticMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "webapp.config.urls"
ASGI_APPLICATION = "webapp.config.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "webapp.config.context.about",
            ],
        },
    }
]

# Database: the truth about every search. SQLite takes its write lock when a transaction begins (IMMEDIATE), so a
# transaction that reads and then writes cannot fail half way; readers never wait (WAL).
DATABASE_URL = os.environ.get("DATABASE_URL", "")
SQLITE_OPTIONS = {
    "timeout": 20,
    "transaction_mode": "IMMEDIATE",
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}
if DATABASE_URL:
    try:
        DATABASES = {"default": dj_database_url.parse(DATABASE_URL, conn_max_age=0)}
    except ValueError:
        DATABASES = {"default": {"ENGINE": "unknown"}}
    _engine = DATABASES["default"]["ENGINE"].rpartition(".")[2]
    if _engine not in ("postgresql", "sqlite3"):
        raise ImproperlyConfigured(
            "DATABASE_URL must look like postgres://user:password@host/name or sqlite:////path/to/file."
        )
    if _engine == "sqlite3":
        DATABASES["default"]["OPTIONS"] = dict(SQLITE_OPTIONS)
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(DATA_DIR / "specpilot.sqlite3"),
            "OPTIONS": dict(SQLITE_OPTIONS),
        }
    }
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Broker: doorbells for the workers, and the channel layer that wakes open pages.
REDIS_URL = redis_url(DATA_DIR)
CHANNEL_PREFIX = f"specpilot{database_number(REDIS_URL)}"  # pub/sub ignores Redis database numbers
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {
            # redis-py drops a socket that is silent for 5 s unless told otherwise
            "hosts": [{"address": REDIS_URL, "socket_timeout": None, "socket_connect_timeout": 5}],
            "prefix": CHANNEL_PREFIX,
        },
    }
}
CELERY_BROKER_URL = celery_url(REDIS_URL)
CELERY_BROKER_TRANSPORT_OPTIONS = {"socket_timeout": None, "socket_connect_timeout": 5, "health_check_interval": 25}
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_PUBLISH_RETRY = False  # a doorbell that cannot be rung now is rung by the reconciler
CELERY_TASK_ACKS_LATE = False  # leases resume work, not redelivery
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_ENABLE_REMOTE_CONTROL = True
CELERY_TASK_DEFAULT_QUEUE = "specpilot.control"

# Work: leases and clocks, in seconds.
LEASE_SECONDS = float(os.environ.get("SPECPILOT_LEASE_SECONDS") or 20)
RECONCILE_SECONDS = float(os.environ.get("SPECPILOT_RECONCILE_SECONDS") or 3)
PRESENCE_SECONDS = 5.0
PERFORM = os.environ.get("SPECPILOT_PERFORM") or "engine.search.perform"  # a module with open_bench and perform

# Sign-in and sessions. Cookies ignore ports, so two installations on one host need cookies of different names.
_INSTALLATION = hashlib.sha256(str(DATA_DIR).encode()).hexdigest()[:8]
SESSION_COOKIE_NAME = f"specpilot_session_{_INSTALLATION}"
CSRF_COOKIE_NAME = f"specpilot_csrf_{_INSTALLATION}"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_HTTPONLY = True  # scripts read the token from the page (csrf_token), never from the cookie
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "search-list"
LOGOUT_REDIRECT_URL = "login"
SIGN_IN_TOKEN_SECONDS = 12 * 3600
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
]

# Headers.
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "data:", "blob:"],  # Plotly draws its download as a data or blob image
        "font-src": ["'self'"],
        "connect-src": ["'self'"],
        "form-action": ["'self'"],
        "base-uri": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
}
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
if HTTPS:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    SECURE_HSTS_SECONDS = 30 * 24 * 3600
    CSRF_TRUSTED_ORIGINS = [f"https://{host}" for host in ALLOWED_HOSTS]

# Static files come straight from static/ (no collectstatic step).
STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
SERVESTATIC_USE_FINDERS = True
SERVESTATIC_AUTOREFRESH = DEBUG

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "webapp.accounts.authentication.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_FILTER_BACKENDS": ["django_filters.rest_framework.DjangoFilterBackend"],
    "DEFAULT_PAGINATION_CLASS": "rest_framework.pagination.PageNumberPagination",
    "PAGE_SIZE": 50,
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "EXCEPTION_HANDLER": "webapp.searches.problems.exception_handler",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "SpecPilot",
    "DESCRIPTION": "Create, watch and steer searches for a faster lossless speculative decoder.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "OAS_VERSION": "3.1.0",
}

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_I18N = False
USE_TZ = True

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": os.environ.get("SPECPILOT_LOG", "INFO")},
    "loggers": {
        "httpx": {"level": "WARNING"},
        "django.request": {"level": "ERROR"},  # a 4xx answer is not news
    },
}
