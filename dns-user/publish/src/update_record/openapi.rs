//! Generates the OpenAPI document from the table of parameters and the providers.

use serde_json::{Map, Value, json};

use super::{
    Provider,
    parameters::{Group, Kind, PARAMETERS, Parameter},
};

/// A collection of the API with create, read, replace, delete and list.
#[derive(Clone, Copy, Debug)]
pub struct Collection {
    /// Path with placeholders, such as `/v2/projects/{project}/dns-update-records`.
    pub path: &'static str,
    /// Name of the schema component of an item.
    pub schema: &'static str,
    /// Description of an item.
    pub item: &'static str,
}

/// Builds the OpenAPI document for these collections.
pub fn document(collections: &[Collection], version: &str) -> Value {
    let mut paths = Map::new();
    for collection in collections {
        let Collection { path, schema, item } = collection;
        paths.insert((*path).to_owned(), collection_operations(path, schema, item));
        paths.insert(format!("{path}/{{name}}"), item_operations(path, schema, item));
    }
    json!({
        "openapi": "3.0.3",
        "info": {
            "title": "DNS update information record",
            "description": "Defines an external DNS server and how it is updated",
            "version": version,
        },
        "paths": paths,
        "components": { "schemas": schemas() },
    })
}

fn schemas() -> Value {
    let provider = Provider::ALL.map(Provider::name);
    // A schema of one provider accepts the others' parameters as unknown members, so `oneOf` would
    // reject every record.
    let providers =
        [Group::Aws, Group::Azure, Group::CoreDns, Group::Rfc2136].map(|group| reference(group.schema()));
    let mut schemas = json!({
        "dnsrecord": {
            "type": "object",
            "required": ["metadata", "spec"],
            "properties": {
                "metadata": { "$ref": "#/components/schemas/metadata" },
                "spec": { "$ref": "#/components/schemas/extdns_info" },
                "status": { "$ref": "#/components/schemas/status" },
            },
        },
        "extdns_info": {
            "type": "object",
            "required": ["provider"],
            "properties": {
                "provider": { "type": "string", "enum": provider, "example": "coredns" },
                "external-dns-parameters": {
                    "allOf": [
                        { "$ref": "#/components/schemas/extdns_provider" },
                        { "$ref": "#/components/schemas/extdns_general" },
                    ],
                },
                "selector": {
                    "type": "string",
                    "example": "app=router,tier in (a,b)",
                    "description": "Selects the endpoints for this provider by label; default: dnsprovider \
                                    equal to the record's name",
                },
            },
        },
        "extdns_provider": {
            "anyOf": providers,
        },
        "metadata": metadata("userdata1", "userdata2", "name_of_dns_information_record"),
        "status": {
            "type": "object",
            "readOnly": true,
            "properties": {
                "observedGeneration": { "type": "integer" },
                "ready": { "type": "boolean" },
                "problems": { "type": "array", "items": { "type": "string" } },
                "remarks": { "type": "array", "items": { "type": "string" } },
            },
        },
        "dnsrecordlist": {
            "type": "object",
            "required": ["metadata", "spec"],
            "properties": {
                "metadata": metadata("userData1", "userData2", super::RecordList::NAME),
                "spec": {
                    "type": "object",
                    "required": ["kv"],
                    "properties": {
                        "kv": {
                            "type": "array",
                            "items": { "type": "object", "additionalProperties": { "type": "string" } },
                            "example": [{ "key1": "dns-update-record-1" }, { "key2": "dns-update-record-47" }],
                        },
                    },
                },
            },
        },
        "inboundintent": intent(),
        "problems": {
            "type": "object",
            "properties": {
                "problems": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "file": { "type": "string" },
                            "line": { "type": "integer" },
                            "path": { "type": "string" },
                            "reason": { "type": "string" },
                            "remedy": { "type": "string" },
                        },
                    },
                },
            },
        },
    });
    for group in [Group::General, Group::Aws, Group::Azure, Group::CoreDns, Group::Rfc2136] {
        let own = PARAMETERS.iter().filter(|parameter| parameter.group == group);
        let properties: Map<_, _> =
            own.map(|parameter| (parameter.name.to_owned(), parameter_schema(parameter))).collect();
        schemas[group.schema()] = json!({ "type": "object", "properties": properties });
    }
    schemas
}

fn parameter_schema(parameter: &Parameter) -> Value {
    let Parameter { name: _, group: _, kind, default, example, summary, effect: _ } = parameter;
    let typed = |text: &str| match kind {
        Kind::Boolean => Value::from(text == "true"),
        // A test checks every example and default against its type.
        Kind::Integer => Value::from(text.parse::<u32>().unwrap_or_default()),
        Kind::Text | Kind::TextOrBoolean | Kind::Duration | Kind::Choice(_) => Value::from(text),
    };
    let mut description = (*summary).to_owned();
    if let Some(reason) = parameter.without_effect() {
        description.push_str(&format!("; {reason}"));
    }
    let kind_name = match kind {
        Kind::Boolean => "boolean",
        Kind::Integer => "integer",
        Kind::Text | Kind::TextOrBoolean | Kind::Duration | Kind::Choice(_) => "string",
    };
    let mut schema = json!({ "type": kind_name, "example": typed(example), "description": description });
    if let Kind::Choice(words) = kind {
        schema["enum"] = json!(words);
    }
    if let Some(default) = default {
        schema["default"] = typed(default);
    }
    schema
}

fn metadata(first: &str, second: &str, name: &str) -> Value {
    json!({
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": { "type": "string", "example": name, "maxLength": 63 },
            "description": { "type": "string", "example": "description of the DNS information" },
            first: { "type": "string", "example": "some user data" },
            second: { "type": "string", "example": "some different user data" },
        },
    })
}

fn intent() -> Value {
    let addresses = json!({ "type": "array", "items": { "type": "string" } });
    let cluster = json!({
        "type": "object",
        "required": ["cluster"],
        "properties": {
            "cluster": { "type": "string", "example": "provider1/edge01" },
            "publicAddresses": addresses,
            "localAddresses": addresses,
        },
    });
    json!({
        "type": "object",
        "required": ["metadata", "spec"],
        "properties": {
            "metadata": metadata("userdata1", "userdata2", "front"),
            "spec": {
                "type": "object",
                "required": ["app"],
                "properties": {
                    "app": { "type": "string" },
                    "externalName": { "type": "string", "example": "shop" },
                    "publicDomain": { "type": "string", "example": "example.org" },
                    "localDomain": { "type": "string", "example": "corp.example" },
                    "ttl": { "type": "integer" },
                    "placements": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["logicalCloud", "clusters"],
                            "properties": {
                                "logicalCloud": { "type": "string" },
                                "clusters": { "type": "array", "items": cluster },
                            },
                        },
                    },
                },
            },
        },
    })
}

fn collection_operations(path: &str, schema: &str, item: &str) -> Value {
    let list = json!({ "type": "array", "items": reference(schema) });
    json!({
        "parameters": path_parameters(path, false),
        "get": { "summary": format!("List: {item}"), "responses": { "200": answer("All of them", &list) } },
        "post": {
            "summary": format!("Create: {item}"),
            "requestBody": body(schema),
            "responses": {
                "201": answer("Created", &reference(schema)),
                "400": refusal("The body is invalid"),
                "409": refusal("The name already exists"),
            },
        },
    })
}

fn item_operations(path: &str, schema: &str, item: &str) -> Value {
    json!({
        "parameters": path_parameters(path, true),
        "get": {
            "summary": format!("Read: {item}"),
            "responses": { "200": answer("It", &reference(schema)), "404": refusal("There is none") },
        },
        "put": {
            "summary": format!("Replace or create: {item}"),
            "requestBody": body(schema),
            "responses": {
                "200": answer("Replaced", &reference(schema)),
                "201": answer("Created", &reference(schema)),
                "400": refusal("The body is invalid"),
                "409": refusal("A document in the folder defines it"),
            },
        },
        "delete": {
            "summary": format!("Delete: {item}"),
            "responses": {
                "204": { "description": "Deleted" },
                "404": refusal("There is none"),
                "409": refusal("A document in the folder defines it, or another resource refers to it"),
            },
        },
    })
}

fn path_parameters(path: &str, with_name: bool) -> Value {
    let placeholders = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let parameter =
        |name: &str| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } });
    placeholders.chain(with_name.then_some("name")).map(parameter).collect()
}

fn reference(schema: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{schema}") })
}

fn answer(description: &str, schema: &Value) -> Value {
    json!({ "description": description, "content": { "application/json": { "schema": schema } } })
}

fn refusal(description: &str) -> Value {
    answer(description, &reference("problems"))
}

fn body(schema: &str) -> Value {
    json!({ "required": true, "content": { "application/json": { "schema": reference(schema) } } })
}
